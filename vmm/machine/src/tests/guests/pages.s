# Has KVM write guest memory in every way that its CPUID offers, each in a page of its own, and
# looks whether anything else changes in those pages: a PVH guest in 32-bit protected mode.
# The first page, the wall clock's, is the guest's own again as soon as it has been told.

        .pushsection .rodata.guest_pages, "a", @progbits
        .code32
        .set PAGES_FEATURES, 0x8000             # what CPUID offers
        .set PAGES_ROUNDS, 0x8004               # how often all pages were looked at
        .set PAGES_WRONG, 0x8008                # how often one was not as it should be
        .set PAGES_AT, 0x200000
        .set PAGES_PATTERN, 0x55555555

        .macro  enable bit, msr, value
        test    $(1 << \bit), %esi
        jz      9f
        mov     $\msr, %ecx
        mov     $(\value), %eax
        xor     %edx, %edx
        wrmsr
9:
        .endm

guest_pages_begin:
        cli
        cld
        mov     $0x7000, %esp
        mov     $0x40000001, %eax
        cpuid
        mov     %eax, %esi
        mov     %eax, PAGES_FEATURES
        mov     $PAGES_AT, %edi
        mov     $PAGES_PATTERN, %eax
        mov     $(5 * 1024), %ecx
        rep stosl

        enable  0,  0x11,       PAGES_AT                        # wall clock, by its old number
        enable  3,  0x4b564d00, PAGES_AT                        # and by its new one
        enable  3,  0x4b564d01, PAGES_AT+0x1000+1               # system time
        enable  5,  0x4b564d03, PAGES_AT+0x2000+1               # steal time
        enable  14, 0x4b564d06, 0x51                            # page faults: the interrupt
        enable  14, 0x4b564d02, PAGES_AT+0x3000+9               # enabled, told by interrupt
        enable  6,  0x4b564d04, PAGES_AT+0x4000+1               # end of interrupt
        enable  17, 0x4b564d08, 1                               # may be migrated

        mov     $PAGES_AT, %edi
        mov     $PAGES_PATTERN, %eax
        mov     $1024, %ecx
        rep stosl

1:      mov     $PAGES_AT, %edi
        mov     $1024, %ecx
        call    pages_check
        # Behind each structure, none of which is longer than 128 bytes.
        mov     $4, %ebx
2:      add     $128, %edi
        mov     $(1024 - 32), %ecx
        call    pages_check
        dec     %ebx
        jnz     2b
        test    $(1 << 3), %esi
        jz      5f
        mov     $0x4b564d00, %ecx               # what was written is there to be read
        rdmsr
        cmp     $PAGES_AT, %eax
        je      5f
        incl    PAGES_WRONG
5:      incl    PAGES_ROUNDS
        jmp     1b

# Compares ecx words from edi on.
pages_check:
        mov     $PAGES_PATTERN, %eax
        repe scasl
        je      4f
        incl    PAGES_WRONG
        lea     (%edi, %ecx, 4), %edi
4:      ret
guest_pages_end:
        .purgem enable
        .code64
        .popsection

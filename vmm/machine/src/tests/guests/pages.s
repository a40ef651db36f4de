# Has KVM write guest memory in every way that its CPUID offers, each in a page of its own, and
# looks whether anything else changes in those pages: a PVH guest, loaded at BASE.
# The first page, the wall clock's, is the guest's own again as soon as it has been told. A timer's
# interrupts are ended by KVM's way where there is one. The page AWAY may be taken from the guest
# while it runs: it is told so by a page fault, and by an interrupt when the page is back.

        .pushsection .rodata.guest_pages, "a", @progbits
        .code32
        .set PAGES_BASE, 0x100000
        .set PAGES_FEATURES, 0x8000             # what CPUID offers
        .set PAGES_ROUNDS, 0x8004               # how often all pages were looked at
        .set PAGES_WRONG, 0x8008                # how often one was not as it should be
        .set PAGES_INTERRUPTS, 0x800c
        .set PAGES_ENDED, 0x8010                # how many of them ended by what KVM wrote
        .set PAGES_GONE, 0x8014                 # how often KVM wrote that AWAY is not there
        .set PAGES_BACK, 0x8018                 # how often it wrote that a page is there again
        .set PAGES_AT, 0x200000
        .set PAGES_FAULT, PAGES_AT + 0x3000     # struct kvm_vcpu_pv_apf_data
        .set PAGES_EOI, PAGES_AT + 0x4000
        .set PAGES_AWAY, 0x300000
        .set PAGES_PATTERN, 0x55555555
        .set PAGES_PERIOD, 62500                # of the local APIC's timer: 1 ms

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
        long_mode pages, PAGES_BASE
        gate    pages, PAGES_BASE, 14, pages_gone
        gate    pages, PAGES_BASE, 0x40, pages_end_interrupt
        gate    pages, PAGES_BASE, 0x51, pages_back
        mov     $0x40000001, %eax
        cpuid
        mov     %eax, %esi
        mov     %eax, PAGES_FEATURES
        mov     $PAGES_AT, %edi
        mov     $PAGES_PATTERN, %eax
        mov     %eax, PAGES_AWAY
        mov     $(5 * 1024), %ecx
        rep stosl
        xor     %eax, %eax                      # KVM writes where it is zero
        mov     $PAGES_FAULT, %edi
        mov     $16, %ecx
        rep stosl
        mov     %eax, PAGES_EOI

        enable  0,  0x11,       PAGES_AT                        # wall clock, by its old number
        enable  3,  0x4b564d00, PAGES_AT                        # and by its new one
        enable  3,  0x4b564d01, PAGES_AT+0x1000+1               # system time
        enable  5,  0x4b564d03, PAGES_AT+0x2000+1               # steal time
        enable  14, 0x4b564d06, 0x51                            # page faults: the interrupt
        enable  14, 0x4b564d02, PAGES_FAULT+0xb                 # told at level 0, too, and by it
        enable  6,  0x4b564d04, PAGES_EOI+1                     # end of interrupt
        enable  17, 0x4b564d08, 1                               # may be migrated

        mov     $PAGES_AT, %edi
        mov     $PAGES_PATTERN, %eax
        mov     $1024, %ecx
        rep stosl

        movl    $3, 0x3e0(%rbp)                 # the timer counts nanoseconds by 16
        movl    $0x20040, 0x320(%rbp)
        movl    $PAGES_PERIOD, 0x380(%rbp)
        sti

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
        cmpl    $PAGES_PATTERN, PAGES_AWAY
        je      3f
        incl    PAGES_WRONG
3:      test    $(1 << 3), %esi
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

# Documentation/virt/kvm/x86/msr.rst, MSR_KVM_PV_EOI_EN.
pages_end_interrupt:
        incl    PAGES_INTERRUPTS
        btrl    $0, PAGES_EOI
        jnc     6f
        incl    PAGES_ENDED
        iretq
6:      movl    $0, 0xb0(%rbp)
        iretq

# MSR_KVM_ASYNC_PF_EN: going back to where the page is missing waits for it.
pages_gone:
        cmpl    $1, PAGES_FAULT
        jne     pages_fault
        movl    $0, PAGES_FAULT
        incl    PAGES_GONE
        add     $8, %rsp
        iretq

# The word is for KVM to write again when it is zero and that has been acknowledged.
pages_back:
        push    %rax
        push    %rcx
        push    %rdx
        cmpl    $0, PAGES_FAULT + 4
        je      7f
        movl    $0, PAGES_FAULT + 4
        incl    PAGES_BACK
        mov     $0x4b564d07, %ecx
        mov     $1, %eax
        xor     %edx, %edx
        wrmsr
7:      pop     %rdx
        pop     %rcx
        pop     %rax
        jmp     pages_end_interrupt

pages_fault:
        incl    PAGES_WRONG
8:      hlt
        jmp     8b
guest_pages_end:
        .purgem enable
        .purgem long_mode
        .purgem gate
        .code64
        .popsection

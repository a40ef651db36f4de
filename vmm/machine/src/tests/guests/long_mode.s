# What guests begin with.

        .set LONG_MODE_IDT, 0x9000
        .set LONG_MODE_TABLES, 0xa000           # four pages
        .set LONG_MODE_APIC, 0xfee00000

# Goes to 64-bit mode with the first 16 MiB and the local APIC, which is switched on and to which
# %rbp points: a KVM nested in software delivers interrupts there only. All lines of the PIC are
# masked. The guest is loaded at `base`, which is also how selector 0x10 begins a gate; whatever
# has no gate of its own goes to NAME_fault.
        .macro  long_mode name, base
        .code32
        cli
        cld
        mov     $0x7000, %esp
        movl    $(LONG_MODE_TABLES + 0x1003), LONG_MODE_TABLES
        movl    $(LONG_MODE_TABLES + 0x2003), LONG_MODE_TABLES + 0x1000
        movl    $(LONG_MODE_TABLES + 0x3003), LONG_MODE_TABLES + 0x1000 + 3 * 8
        mov     $0x83, %eax                     # present, writable, large
        mov     $(LONG_MODE_TABLES + 0x2000), %edi
        mov     $8, %ecx
1:      mov     %eax, (%edi)
        add     $0x200000, %eax
        add     $8, %edi
        loop    1b
        movl    $0xfee0009b, LONG_MODE_TABLES + 0x3000 + 503 * 8
        mov     $LONG_MODE_TABLES, %eax
        mov     %eax, %cr3
        mov     %cr4, %eax
        or      $0x20, %eax                     # physical address extension
        mov     %eax, %cr4
        mov     $0xc0000080, %ecx
        rdmsr
        or      $0x100, %eax                    # long mode
        wrmsr
        lgdt    \name\()_gdtr - guest_\name\()_begin + \base
        mov     %cr0, %eax
        or      $0x80000001, %eax
        mov     %eax, %cr0
        ljmp    $0x10, $(\name\()_long - guest_\name\()_begin + \base)

        .balign 8
\name\()_gdt:
        .quad   0, 0, 0x00af9a000000ffff, 0x00cf92000000ffff
\name\()_gdtr:
        .word   31
        .quad   \name\()_gdt - guest_\name\()_begin + \base
\name\()_idtr:
        .word   4095
        .quad   LONG_MODE_IDT

        .code64
\name\()_long:
        mov     $0x18, %eax
        mov     %eax, %ss
        mov     %eax, %ds
        mov     %eax, %es
        mov     $LONG_MODE_IDT, %edi
        mov     $256, %ecx
2:      movl    $(\name\()_fault - guest_\name\()_begin + \base), (%rdi)
        movl    $(\base + 0x8e00), 4(%rdi)
        add     $16, %edi
        loop    2b
        lidt    \name\()_idtr - guest_\name\()_begin + \base
        mov     $LONG_MODE_APIC, %ebp

        # The PIC at vectors 0x20 and 0x28.
        mov     $0x11, %al
        out     %al, $0x20
        out     %al, $0xa0
        mov     $0x20, %al
        out     %al, $0x21
        mov     $0x28, %al
        out     %al, $0xa1
        mov     $4, %al
        out     %al, $0x21
        mov     $2, %al
        out     %al, $0xa1
        mov     $1, %al
        out     %al, $0x21
        out     %al, $0xa1
        mov     $0xff, %al
        out     %al, $0x21
        out     %al, $0xa1
        movl    $0x1ff, 0xf0(%rbp)
        .endm

# Has an interrupt or exception handled at `handler`.
        .macro  gate name, base, vector, handler
        movl    $(\handler - guest_\name\()_begin + \base), LONG_MODE_IDT + \vector * 16
        .endm

# Counts the ticks of one timer: a PVH guest, loaded at BASE.
# The two words at byte 4 are filled in by the test: which timer (0: the PIT by the PIC, 1: the
# local APIC's, periodic, 2: its TSC deadline, 3: once, and again from each tick on, 4: once), and its period in the timer's own units.

        .pushsection .rodata.guest_timers, "a", @progbits
        .code32
        .set TIMERS_BASE, 0x100000
        .set TIMERS_TICKS, 0x8000
        .set TIMERS_FAULTS, 0x8004
        .set TIMERS_NEXT, 0x8008                # the next deadline, 64 bits
        .set TIMERS_IDT, 0x9000
        .set TIMERS_TABLES, 0xa000              # four pages
        .set TIMERS_APIC, 0xfee00000

guest_timers_begin:
        jmp     timers_start
        .balign 4
timers_kind:
        .long   0
timers_period:
        .long   0

# Goes to 64-bit mode with the first 16 MiB and the local APIC mapped: a KVM nested in software
# delivers interrupts there only.
timers_start:
        cli
        mov     $0x7000, %esp
        movl    $(TIMERS_TABLES + 0x1003), TIMERS_TABLES
        movl    $(TIMERS_TABLES + 0x2003), TIMERS_TABLES + 0x1000
        movl    $(TIMERS_TABLES + 0x3003), TIMERS_TABLES + 0x1000 + 3 * 8
        mov     $0x83, %eax                     # present, writable, large
        mov     $(TIMERS_TABLES + 0x2000), %edi
        mov     $8, %ecx
1:      mov     %eax, (%edi)
        add     $0x200000, %eax
        add     $8, %edi
        loop    1b
        movl    $0xfee0009b, TIMERS_TABLES + 0x3000 + 503 * 8
        mov     $TIMERS_TABLES, %eax
        mov     %eax, %cr3
        mov     %cr4, %eax
        or      $0x20, %eax                     # physical address extension
        mov     %eax, %cr4
        mov     $0xc0000080, %ecx
        rdmsr
        or      $0x100, %eax                    # long mode
        wrmsr
        lgdt    timers_gdtr - guest_timers_begin + TIMERS_BASE
        mov     %cr0, %eax
        or      $0x80000001, %eax
        mov     %eax, %cr0
        ljmp    $0x10, $(timers_long - guest_timers_begin + TIMERS_BASE)

        .code64
timers_long:
        mov     $0x18, %eax
        mov     %eax, %ss
        mov     %eax, %ds
        mov     %eax, %es
        # A gate's first word: selector 0x10 and the low half of the address. BASE is both.
        mov     $TIMERS_IDT, %edi
        mov     $256, %ecx
2:      movl    $(timers_fault - guest_timers_begin + TIMERS_BASE), (%rdi)
        movl    $(TIMERS_BASE + 0x8e00), 4(%rdi)
        add     $16, %edi
        loop    2b
        movl    $(timers_on_pit - guest_timers_begin + TIMERS_BASE), TIMERS_IDT + 0x20 * 16
        movl    $(timers_on_apic - guest_timers_begin + TIMERS_BASE), TIMERS_IDT + 0x40 * 16
        lidt    timers_idtr - guest_timers_begin + TIMERS_BASE
        mov     $TIMERS_APIC, %ebp

        # The PIC at vectors 0x20 and 0x28, all lines masked.
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

        mov     timers_period - guest_timers_begin + TIMERS_BASE, %ebx
        mov     timers_kind - guest_timers_begin + TIMERS_BASE, %eax
        cmp     $1, %eax
        je      timers_periodic
        cmp     $2, %eax
        je      timers_deadline
        ja      timers_once

        mov     $0xfe, %al
        out     %al, $0x21
        mov     $0x34, %al                      # channel 0, both bytes, rate generator
        out     %al, $0x43
        mov     %bl, %al
        out     %al, $0x40
        mov     %bh, %al
        out     %al, $0x40
        jmp     timers_idle

timers_periodic:
        movl    $3, 0x3e0(%rbp)         # divide by 16
        movl    $0x20040, 0x320(%rbp)
        mov     %ebx, 0x380(%rbp)
        jmp     timers_idle

timers_once:
        movl    $3, 0x3e0(%rbp)
        movl    $0x40, 0x320(%rbp)
        mov     %ebx, 0x380(%rbp)
        jmp     timers_idle

timers_deadline:
        movl    $0x40040, 0x320(%rbp)
        rdtsc
        mov     %eax, TIMERS_NEXT
        mov     %edx, TIMERS_NEXT + 4
        call    timers_arm

timers_idle:
        sti
        hlt
        jmp     timers_idle

# Each deadline is a period after the one before, also if it has passed already.
timers_arm:
        mov     timers_period - guest_timers_begin + TIMERS_BASE, %ebx
        add     %rbx, TIMERS_NEXT
        mov     TIMERS_NEXT, %eax
        mov     TIMERS_NEXT + 4, %edx
        mov     $0x6e0, %ecx
        wrmsr
        ret

timers_on_pit:
        push    %rax
        incl    TIMERS_TICKS
        mov     $0x20, %al
        out     %al, $0x20
        pop     %rax
        iretq

timers_on_apic:
        push    %rax
        push    %rbx
        push    %rcx
        push    %rdx
        incl    TIMERS_TICKS
        cmpl    $2, timers_kind - guest_timers_begin + TIMERS_BASE
        jne     3f
        call    timers_arm
3:      cmpl    $3, timers_kind - guest_timers_begin + TIMERS_BASE
        jne     5f
        mov     timers_period - guest_timers_begin + TIMERS_BASE, %eax
        mov     %eax, 0x380(%rbp)
5:      movl    $0, 0xb0(%rbp)
        pop     %rdx
        pop     %rcx
        pop     %rbx
        pop     %rax
        iretq

timers_fault:
        incl    TIMERS_FAULTS
4:      hlt
        jmp     4b

        .balign 8
timers_gdt:
        .quad   0, 0, 0x00af9a000000ffff, 0x00cf92000000ffff
timers_gdtr:
        .word   31
        .quad   timers_gdt - guest_timers_begin + TIMERS_BASE
timers_idtr:
        .word   4095
        .quad   TIMERS_IDT
guest_timers_end:
        .popsection

# Counts the ticks of one timer: a PVH guest, loaded at BASE.
# The two words at byte 4 are filled in by the test: which timer (0: the PIT by the PIC, 1: the
# local APIC's, periodic, 2: its TSC deadline, 3: once, and again from each tick on, 4: once), and its period in the timer's own units.

        .pushsection .rodata.guest_timers, "a", @progbits
        .code32
        .set TIMERS_BASE, 0x100000
        .set TIMERS_TICKS, 0x8000
        .set TIMERS_FAULTS, 0x8004
        .set TIMERS_NEXT, 0x8008                # the next deadline, 64 bits

guest_timers_begin:
        jmp     timers_start
        .balign 4
timers_kind:
        .long   0
timers_period:
        .long   0

timers_start:
        long_mode timers, TIMERS_BASE
        gate    timers, TIMERS_BASE, 0x20, timers_on_pit
        gate    timers, TIMERS_BASE, 0x40, timers_on_apic

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

guest_timers_end:
        .popsection

# A guest that any VMM with PVH boot can run (Xen's docs/misc/pvh.pandoc): entered in 32-bit
# protected mode, goes to 64-bit privilege level 3 and calls guest_main there. Level 3, because a
# KVM that is nested in software runs only that level natively; a TSS with a clear I/O bitmap lets
# it write to ports all the same.

        .section .note.pvh, "a", @note
        .balign 4
        .long 4, 4, 18                  # XEN_ELFNOTE_PHYS32_ENTRY
        .asciz "Xen"
        .long entry32

        .equ CODE64, 0x08
        .equ DATA_USER, 0x1b            # 0x18, level 3
        .equ CODE64_USER, 0x23          # 0x20, level 3
        .equ TSS_SELECTOR, 0x28

        .globl entry32
        .section .text.entry, "ax"
        .code32
entry32:
        mov     $stack_end, %esp
        mov     %ebx, %edi              # struct hvm_start_info, first argument

        # Identity map of the first 4 GiB with pages of 2 MiB, for level 3.
        movl    $(level3 + 7), level4
        mov     $level2 + 7, %eax
        mov     $level3, %ebx
        mov     $4, %ecx
0:      mov     %eax, (%ebx)
        add     $0x1000, %eax
        add     $8, %ebx
        loop    0b
        mov     $0x87, %eax             # present, writable, user, large
        xor     %edx, %edx
        mov     $level2, %ebx
        mov     $2048, %ecx
1:      mov     %eax, (%ebx)
        add     $0x200000, %eax
        add     $8, %ebx
        loop    1b

        mov     $level4, %eax
        mov     %eax, %cr3
        mov     %cr4, %eax
        or      $0x620, %eax            # PAE, OSFXSR, OSXMMEXCPT
        mov     %eax, %cr4
        mov     $0xc0000080, %ecx       # EFER.LME
        rdmsr
        bts     $8, %eax
        wrmsr
        lgdt    gdt_pointer
        mov     %cr0, %eax
        and     $~0xc, %eax             # EM and TS off
        bts     $31, %eax
        mov     %eax, %cr0
        ljmp    $CODE64, $entry64

        .code64
entry64:
        # The TSS descriptor's base.
        mov     $tss, %eax
        mov     %ax, gdt + TSS_SELECTOR + 2
        shr     $16, %eax
        mov     %al, gdt + TSS_SELECTOR + 4
        mov     %ah, gdt + TSS_SELECTOR + 7
        movw    $104, tss + 102         # where the I/O bitmap begins
        mov     $TSS_SELECTOR, %ax
        ltr     %ax
        pushq   $DATA_USER
        pushq   $stack_end
        pushq   $2
        pushq   $CODE64_USER
        pushq   $level3_entry
        iretq
level3_entry:
        mov     $DATA_USER, %eax
        mov     %eax, %ds
        mov     %eax, %es
        call    guest_main
2:      jmp     2b

        .data
        .balign 16
gdt:    .quad   0
        .quad   0x00af9a000000ffff      # code, level 0
        .quad   0x00cf92000000ffff      # data, level 0
        .quad   0x00cff2000000ffff      # data, level 3
        .quad   0x00affa000000ffff      # code, level 3
        .quad   0x0000890000000000 + 104 + 8192
        .quad   0
gdt_pointer:
        .word   . - gdt - 1
        .long   gdt

        .bss
        .balign 4096
level4: .skip   4096
level3: .skip   4096
level2: .skip   4 * 4096
        .skip   16384
stack_end:
        .balign 4096
tss:    .skip   104 + 8192 + 1

        .section .note.GNU-stack, "", @progbits

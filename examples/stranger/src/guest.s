# The guest: an ELF file for PVH (Xen's docs/misc/pvh.pandoc), laid out by the assembler.
#
# It begins in 32-bit protected mode at level 0, goes to 64-bit mode and on to level 3, where a KVM
# that is itself nested in software runs code at full speed; a task state segment opens all ports
# for it. It fills memory with noise, and then, in each tick, dirties some pages and writes the
# tick's number to a port: its heartbeat.

.set BASE, 0x200000
.set GUEST_STACK, 0x220000
.set GUEST_TSS, 0x220000
.set GUEST_PML4, 0x230000
.set GUEST_PDPT, 0x231000
.set GUEST_PD, 0x232000
.set MEMORY_END, 0x240000

.set NOISE, 0x1000000           # 16 MiB from 16 MiB on
.set NOISE_END, 0x2000000
.set WORK_PAGES, 2048           # of which 8 MiB are written again and again
.set TICK_PAGES, 4
.set TICK_CYCLES, 400000        # some 150 us
.set TICK_PORT, 0x500

.pushsection .rodata.stranger_guest, "a"
.balign 8
stranger_guest_begin:
    .byte 0x7f, 0x45, 0x4c, 0x46, 2, 1, 1, 0
    .quad 0
    .word 2, 62                 # executable, x86-64
    .long 1
    .quad start32 - image + BASE
    .quad 64, 0                 # program headers; no sections
    .long 0
    .word 64, 56, 2, 0, 0, 0
    .long 1, 7                  # what is loaded
    .quad image - stranger_guest_begin, BASE, BASE, image_end - image, MEMORY_END - BASE, 0x1000
    .long 4, 4                  # the note
    .quad note - stranger_guest_begin, 0, 0, note_end - note, note_end - note, 4
note:
    .long 4, 4, 18              # XEN_ELFNOTE_PHYS32_ENTRY
    .byte 0x58, 0x65, 0x6e, 0
    .long start32 - image + BASE
note_end:
    .balign 16
image:
gdt:
    .quad 0, 0x00af9a000000ffff, 0x00cf92000000ffff, 0
    .quad 0x00cffa000000ffff, 0x00cff2000000ffff, 0x00affa000000ffff
    .quad (104 + 8192) + ((GUEST_TSS & 0xffffff) << 16) + (0x89 << 40), 0
gdt_end:
gdt_pointer:
    .word gdt_end - gdt - 1
    .long BASE                  # where the table is: it comes first
    .balign 16
.code32
start32:
    cli
    # Page tables: the first GiB at its own address, in 2 MiB pages, for level 3.
    movl $(GUEST_PDPT + 0x67), GUEST_PML4
    movl $(GUEST_PD + 0x67), GUEST_PDPT
    xorl %ecx, %ecx
1:  movl %ecx, %eax
    shll $21, %eax
    orl $0xe7, %eax
    movl %eax, GUEST_PD(,%ecx,8)
    incl %ecx
    cmpl $512, %ecx
    jne 1b
    movw $104, GUEST_TSS + 102  # the I/O bitmap, all zeros: every port is open
    movl $GUEST_PML4, %eax
    movl %eax, %cr3
    movl %cr4, %eax
    orl $0x620, %eax            # PAE, SSE
    movl %eax, %cr4
    movl $0xc0000080, %ecx
    rdmsr
    orl $0x100, %eax            # long mode
    wrmsr
    lgdtl gdt_pointer - image + BASE
    movl %cr0, %eax
    orl $0x80000001, %eax
    andl $0xfffffff3, %eax
    movl %eax, %cr0
    ljmpl $8, $(start64 - image + BASE)
.code64
start64:
    movw $0x38, %ax
    ltr %ax
    movw $0x10, %ax
    movw %ax, %ds
    movw %ax, %es
    movw %ax, %ss
    movl $GUEST_STACK, %esp
    pushq $0x2b
    pushq $GUEST_STACK
    pushq $0x3002               # ports are for level 3, interrupts are off
    pushq $0x33
    pushq $(level3 - image + BASE)
    iretq
level3:
    movl $NOISE, %edi
    movabsq $88172645463325252, %rax
2:  movq %rax, %rdx
    shlq $13, %rdx
    xorq %rdx, %rax
    movq %rax, %rdx
    shrq $7, %rdx
    xorq %rdx, %rax
    movq %rax, %rdx
    shlq $17, %rdx
    xorq %rdx, %rax
    movq %rax, (%rdi)
    addq $8, %rdi
    cmpq $NOISE_END, %rdi
    jne 2b
    xorl %ebx, %ebx             # the tick's number
    xorl %esi, %esi             # the next page
3:  incl %ebx
    movl $TICK_PAGES, %ecx
4:  movl %esi, %edi
    shll $12, %edi
    movq %rbx, NOISE(%rdi)
    incl %esi
    andl $(WORK_PAGES - 1), %esi
    decl %ecx
    jnz 4b
    movl %ebx, %eax
    movw $TICK_PORT, %dx
    outl %eax, %dx
    rdtsc
    shlq $32, %rdx
    orq %rdx, %rax
    leaq TICK_CYCLES(%rax), %r8
5:  pause
    rdtsc
    shlq $32, %rdx
    orq %rdx, %rax
    cmpq %r8, %rax
    jb 5b
    jmp 3b
image_end:
stranger_guest_end:
.popsection

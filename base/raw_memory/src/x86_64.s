# Accesses to raw memory. All are leaves that use no stack, with the System V ABI's registers (3.2.3);
# `fault.rs` sends a bus error within them to one of the ends below.

.macro raw_memory_label name
.globl \name
.hidden \name
\name:
.endm

.macro raw_memory_function name
.p2align 4
.type \name, @function
    raw_memory_label \name
.endm

# How a check for zeros ends: at what is not, after all, or on to the next so many bytes.
.macro raw_memory_verdict bytes, clean
    jnz 3f
    add rdi, \bytes
    cmp rdi, rcx
    jne 2b
    mov eax, 1
    \clean
    ret
3:
    xor eax, eax
    \clean
    ret
.endm

.pushsection .text.martlet_raw_memory, "ax", @progbits
.p2align 4
raw_memory_label martlet_raw_memory_begin

# (to, from, bytes)
raw_memory_function martlet_raw_memory_copy
    mov rcx, rdx
    shr rcx, 3
    jz 3f
2:
    mov rax, [rsi]
    mov [rdi], rax
    add rsi, 8
    add rdi, 8
    dec rcx
    jnz 2b
3:
    test dl, 4
    jz 4f
    mov eax, [rsi]
    mov [rdi], eax
    add rsi, 4
    add rdi, 4
4:
    test dl, 2
    jz 5f
    movzx eax, word ptr [rsi]
    mov [rdi], ax
    add rsi, 2
    add rdi, 2
5:
    test dl, 1
    jz 6f
    movzx eax, byte ptr [rsi]
    mov [rdi], al
6:
    xor eax, eax
    ret

# (to, bytes)
raw_memory_function martlet_raw_memory_clear
    mov rcx, rsi
    xor eax, eax
    rep stosb
    ret

# All zero checks look at the first cache line, which settles most pages with content, then go on from
# the start to the end. Looking ahead at a line in the middle or at the end catches a few more pages
# early, but cost a sixth of the speed on zero pages where it was measured, as the processor's
# prefetcher follows ascending reads. So did prefetching by hand.

# (page)
raw_memory_function martlet_raw_memory_is_zero
    mov rax, [rdi]
    or rax, [rdi + 8]
    or rax, [rdi + 16]
    or rax, [rdi + 24]
    or rax, [rdi + 32]
    or rax, [rdi + 40]
    or rax, [rdi + 48]
    or rax, [rdi + 56]
    jnz 3f
    lea rcx, [rdi + 4096]
    .p2align 4
2:
    mov rax, [rdi]
    mov rdx, [rdi + 8]
    mov r8, [rdi + 16]
    mov r9, [rdi + 24]
    or rax, [rdi + 32]
    or rdx, [rdi + 40]
    or r8, [rdi + 48]
    or r9, [rdi + 56]
    or rax, [rdi + 64]
    or rdx, [rdi + 72]
    or r8, [rdi + 80]
    or r9, [rdi + 88]
    or rax, [rdi + 96]
    or rdx, [rdi + 104]
    or r8, [rdi + 112]
    or r9, [rdi + 120]
    or rax, rdx
    or r8, r9
    or rax, r8
    raw_memory_verdict 128

raw_memory_label martlet_raw_memory_wide

# The wide ones OR 512 bytes at a time into two accumulators, and leave the vector registers' upper
# halves clean.

# (page), AVX2
raw_memory_function martlet_raw_memory_is_zero_avx2
    vmovdqa ymm0, [rdi]
    vpor ymm0, ymm0, [rdi + 32]
    vptest ymm0, ymm0
    jnz 3f
    lea rcx, [rdi + 4096]
    .p2align 4
2:
    vmovdqa ymm0, [rdi]
    vmovdqa ymm1, [rdi + 32]
    vpor ymm0, ymm0, [rdi + 64]
    vpor ymm1, ymm1, [rdi + 96]
    vpor ymm0, ymm0, [rdi + 128]
    vpor ymm1, ymm1, [rdi + 160]
    vpor ymm0, ymm0, [rdi + 192]
    vpor ymm1, ymm1, [rdi + 224]
    vpor ymm0, ymm0, [rdi + 256]
    vpor ymm1, ymm1, [rdi + 288]
    vpor ymm0, ymm0, [rdi + 320]
    vpor ymm1, ymm1, [rdi + 352]
    vpor ymm0, ymm0, [rdi + 384]
    vpor ymm1, ymm1, [rdi + 416]
    vpor ymm0, ymm0, [rdi + 448]
    vpor ymm1, ymm1, [rdi + 480]
    vpor ymm0, ymm0, ymm1
    vptest ymm0, ymm0
    raw_memory_verdict 512, vzeroupper

# (page), AVX-512F
raw_memory_function martlet_raw_memory_is_zero_avx512
    vmovdqa64 zmm0, [rdi]
    vptestmq k1, zmm0, zmm0
    kortestw k1, k1
    jnz 3f
    lea rcx, [rdi + 4096]
    .p2align 4
2:
    vmovdqa64 zmm0, [rdi]
    vmovdqa64 zmm1, [rdi + 64]
    vporq zmm0, zmm0, [rdi + 128]
    vporq zmm1, zmm1, [rdi + 192]
    vporq zmm0, zmm0, [rdi + 256]
    vporq zmm1, zmm1, [rdi + 320]
    vporq zmm0, zmm0, [rdi + 384]
    vporq zmm1, zmm1, [rdi + 448]
    vporq zmm0, zmm0, zmm1
    vptestmq k1, zmm0, zmm0
    kortestw k1, k1
    raw_memory_verdict 512, vzeroupper

raw_memory_label martlet_raw_memory_end

# Where a fault ends.
raw_memory_label martlet_raw_memory_wide_fault
    vzeroupper
raw_memory_label martlet_raw_memory_fault
    mov eax, 2
    ret
.popsection
.purgem raw_memory_label
.purgem raw_memory_function
.purgem raw_memory_verdict

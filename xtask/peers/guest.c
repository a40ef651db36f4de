/* The load of the comparison: fills memory with random words, then rewrites pages of a working set
 * at a steady pace and writes one byte to COM1 for each step. Command line, all in decimal:
 * fill=MiB ws=MiB rate=PAGES tick=MICROSECONDS khz=TSC. "R" on COM1 says that memory is filled. */
#include <stdint.h>

#define COM1 0x3f8
#define FIRST_BYTE (64ull << 20)
#define PAGE 4096ull

/* The part of struct hvm_start_info (Xen's public/arch-x86/hvm/start_info.h) that is used. */
struct start_info {
    uint32_t magic, version, flags, modules;
    uint64_t module_list, command_line;
};

static void say(char byte)
{
    __asm__ volatile("outb %0, %1" : : "a"(byte), "Nd"((uint16_t)COM1));
}

static uint64_t now(void)
{
    uint32_t low, high;
    __asm__ volatile("rdtsc" : "=a"(low), "=d"(high));
    return (uint64_t)high << 32 | low;
}

/* The number behind "name=" in text, else otherwise. */
static uint64_t option(const char *text, const char *name, uint64_t otherwise)
{
    while (*text) {
        const char *at = text, *want = name;
        while (*want && *at == *want)
            at++, want++;
        if (!*want && *at == '=') {
            uint64_t value = 0;
            for (at++; *at >= '0' && *at <= '9'; at++)
                value = value * 10 + (uint64_t)(*at - '0');
            return value;
        }
        while (*text && *text != ' ')
            text++;
        while (*text == ' ')
            text++;
    }
    return otherwise;
}

void guest_main(const struct start_info *info)
{
    const char *line = info->command_line ? (const char *)info->command_line : "";
    const uint64_t words = (option(line, "fill", 64) << 20) / 8;
    const uint64_t pages = (option(line, "ws", 16) << 20) / PAGE;
    const uint64_t rate = option(line, "rate", 1);
    const uint64_t step = option(line, "tick", 1000) * option(line, "khz", 2500000) / 1000;
    volatile uint64_t *memory = (volatile uint64_t *)FIRST_BYTE;
    uint64_t random = 0x853c49e6748fea9bull, page = 0, count = 0;

    for (uint64_t i = 0; i < words; i++) {
        random = random * 6364136223846793005ull + 1442695040888963407ull;
        memory[i] = random ^ random >> 29;
    }
    say('R');
    for (uint64_t due = now() + step;;) {
        for (uint64_t i = 0; i < rate; i++) {
            memory[page * (PAGE / 8)] = ++count;
            page = page + 1 == pages ? 0 : page + 1;
        }
        say('.');
        while (now() < due)
            __builtin_ia32_pause();
        due += step;
        if (now() > due)
            due = now() + step;
    }
}

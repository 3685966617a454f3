/* Reads one block with the kernel of the count memory, in a program of its own, so that an emulator can run it.
 *
 * Standard input: the sizes of `struct memory`, its arrays, the states, `struct rates`, the sizes of `struct block` and its
 * arrays, each after its number of bytes (int64; -1 for a null pointer). Output: the same parts, after the block was read.
 */
#include <stdio.h>
#include <stdlib.h>
#include "count_memory_cpu.c"

enum { MEMORY_ARRAYS = 8, BLOCK_ARRAYS = 9 };
static int64_t bytes[32];
static void *part[32];
static int parts;

static void *next_part(void)
{
    int64_t n;
    if (fread(&n, sizeof n, 1, stdin) != 1) exit(1);
    bytes[parts] = n;
    part[parts] = n < 0 ? NULL : aligned_alloc(64, (size_t)(n / 64 + 1) * 64);
    if (n > 0 && fread(part[parts], 1, (size_t)n, stdin) != (size_t)n) exit(1);
    return part[parts++];
}
int main(void)
{
    struct memory memory;
    struct block block;
    hf_count_memory_version();
    memcpy(&memory, next_part(), 6 * sizeof(int64_t));
    for (int i = 0; i < MEMORY_ARRAYS; i++) ((void **)&memory.slots)[i] = next_part();
    uint8_t *states = next_part();
    const struct rates *rates = next_part();
    memcpy(&block, next_part(), 5 * sizeof(int64_t));
    for (int i = 0; i < BLOCK_ARRAYS; i++) ((void **)&block.bytes)[i] = next_part();
    hf_count_memory_read(&memory, states, rates, &block);
    for (int i = 0; i < parts; i++) {
        fwrite(bytes + i, sizeof *bytes, 1, stdout);
        if (bytes[i] > 0) fwrite(part[i], 1, (size_t)bytes[i], stdout);
    }
    return 0;
}

/* The linear recurrence h_t = a_t * h_{t-1} + b_t and its gradients on a CPU.
 *
 * Plain C without Python.h: linear_scan_cpu.py checks the tensors and passes pointers. One thread takes a stream
 * at a time. Its state stays in the inner cache while whole rows of a, b and h go past once: upwards in the forward
 * pass, strictly downwards in the backward one (1.7 times as fast as downwards by rows but upwards within each).
 * Rows are not split among threads: two halves by two threads took longer than the whole by one, because only
 * sequential reads are fast.
 *
 * The kernels are this file included by itself, once for each element type and instruction set: see the end.
 */
#ifndef KERNEL

#include "kernel.h"
#include <pthread.h>
#include <signal.h>
#include <sys/mman.h>

#define LINE 64       /* bytes of a cache line */
#define MAX_THREADS 256

/* What linear_scan_cpu.py packs; raise VERSION with every change. Pointers are integers; strides count elements. The
 * forward pass reads a, b and writes h and last; the backward pass reads a, b (the gradient of h), h, last (the
 * gradient of the final state, or null) and writes grad_a, grad_b and grad_state. */
#define VERSION 2
struct scan {
    int64_t type, threads, bypass_cache, batch, steps, width;
    int64_t a, a_stream, a_step, b, b_stream, b_step;
    int64_t initial, resets, h, last, grad_a, grad_b, grad_state;
};

typedef void kernel(const struct scan *scan, int64_t stream);

INLINE uint32_t bits_of(float x)
{
    uint32_t u;
    memcpy(&u, &x, sizeof u);
    return u;
}

INLINE float float_of(uint32_t u)
{
    float x;
    memcpy(&x, &u, sizeof x);
    return x;
}

INLINE float from_bfloat16(uint16_t x) { return float_of((uint32_t)x << 16); }

INLINE uint16_t to_bfloat16(float x)
{
    uint32_t u = bits_of(x);
    uint32_t rounded = (u + 0x7fff + ((u >> 16) & 1)) >> 16;
    return (uint16_t)((u & 0x7fffffff) > 0x7f800000 ? 0x7fc0 : rounded);
}

/* By integer arithmetic, which every compiler turns into vector code; ties to even, subnormals kept. */
INLINE float from_float16(uint16_t x)
{
    uint32_t magnitude = (uint32_t)(x & 0x7fff) << 13;
    uint32_t u = bits_of(float_of(magnitude) * 0x1p112f);
    u |= -(uint32_t)(magnitude >= 0x7c00u << 13) & 0x7f800000u;
    return float_of(u | (uint32_t)(x & 0x8000) << 16);
}

INLINE uint16_t to_float16(float x)
{
    uint32_t sign = bits_of(x) & 0x80000000u, u = bits_of(x) ^ sign, magic = 126u << 23;
    uint32_t special = 0x7c00 | (-(uint32_t)(u > 0x7f800000u) & 0x200);
    uint32_t small = bits_of(float_of(u) + float_of(magic)) - magic;
    uint32_t normal = (u - (112u << 23) + 0xfff + ((u >> 13) & 1)) >> 13;
    uint32_t is_special = -(uint32_t)(u >= 143u << 23), is_small = -(uint32_t)(u < 113u << 23);
    uint32_t magnitude = (is_special & special) | (is_small & small) | (~(is_special | is_small) & normal);
    return (uint16_t)(magnitude | sign >> 16);
}

#define AS_IT_IS(x) (x)

/* ---- Instruction sets: how `put` writes one line of results, and how functions are compiled ---- */

#ifdef X86_LEVELS
INLINE void put_sse2(void *target, const void *line, int bypass)
{
    const __m128i *from = line;
    if (!bypass) {
        memcpy(target, line, LINE);
        return;
    }
    for (int i = 0; i < LINE / 16; i++)
        _mm_stream_si128((__m128i *)target + i, _mm_loadu_si128(from + i));
}
__attribute__((target("avx2,fma"))) INLINE void put_avx2(void *target, const void *line, int bypass)
{
    const __m256i *from = line;
    if (!bypass) {
        memcpy(target, line, LINE);
        return;
    }
    _mm256_stream_si256((__m256i *)target, _mm256_loadu_si256(from));
    _mm256_stream_si256((__m256i *)target + 1, _mm256_loadu_si256(from + 1));
}
#define TARGET_AVX512 __attribute__((target("avx2,fma,avx512f,avx512bw,avx512dq,avx512vl")))
TARGET_AVX512 INLINE void put_avx512(void *target, const void *line, int bypass)
{
    if (bypass)
        _mm512_stream_si512((__m512i *)target, _mm512_loadu_si512(line));
    else
        _mm512_storeu_si512(target, _mm512_loadu_si512(line));
}
#else
INLINE void put_base(void *target, const void *line, int bypass)
{
    (void)bypass;
    memcpy(target, line, LINE);
}
#endif

#define KERNEL

#define SUFFIX float32
#define STORED float
#define STATE float
#define LOAD AS_IT_IS
#define SAVE AS_IT_IS
#include "linear_scan_cpu.c"

#define SUFFIX float64
#define STORED double
#define STATE double
#define LOAD AS_IT_IS
#define SAVE AS_IT_IS
#include "linear_scan_cpu.c"

#define SUFFIX bfloat16
#define STORED uint16_t
#define STATE float
#define LOAD from_bfloat16
#define SAVE to_bfloat16
#include "linear_scan_cpu.c"

#define SUFFIX float16
#define STORED uint16_t
#define STATE float
#define LOAD from_float16
#define SAVE to_float16
#include "linear_scan_cpu.c"

#define COMPLEX
#define SUFFIX complex64
#define STORED float
#define STATE float
#define LOAD AS_IT_IS
#define SAVE AS_IT_IS
#include "linear_scan_cpu.c"

#define COMPLEX
#define SUFFIX complex128
#define STORED double
#define STATE double
#define LOAD AS_IT_IS
#define SAVE AS_IT_IS
#include "linear_scan_cpu.c"

/* For many steps: the rounding of a state in float32 adds up where it decays slowly. */
#define SUFFIX wide_float32
#define STORED float
#define STATE double
#define LOAD (double)
#define SAVE (float)
#include "linear_scan_cpu.c"

#define COMPLEX
#define SUFFIX wide_complex64
#define STORED float
#define STATE double
#define LOAD (double)
#define SAVE (float)
#include "linear_scan_cpu.c"

/* ---- Choosing a kernel ---- */

#define KERNELS(pass, level)                                                                                          \
    {pass##_float32_##level,      pass##_float64_##level,       pass##_bfloat16_##level,                              \
     pass##_float16_##level,      pass##_complex64_##level,     pass##_complex128_##level,                            \
     pass##_wide_float32_##level, pass##_wide_complex64_##level}

enum { TYPES = 8, FORWARD = 0, BACKWARD = 1 };
#ifdef X86_LEVELS
static kernel *const kernels[][2][TYPES] = {
    {KERNELS(forward, sse2), KERNELS(backward, sse2)},
    {KERNELS(forward, avx2), KERNELS(backward, avx2)},
    {KERNELS(forward, avx512), KERNELS(backward, avx512)},
};
#else
static kernel *const kernels[][2][TYPES] = {{KERNELS(forward, base), KERNELS(backward, base)}};
#endif

/* Bytes of one element of h. */
static const int64_t stored_size[TYPES] = {4, 8, 2, 2, 8, 16, 4, 8};

static int instruction_level;

static int best_level(void)
{
#ifdef X86_LEVELS
    __builtin_cpu_init();
    if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma"))
        return 0;
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl"))
        return 2;
    return 1;
#else
    return 0;
#endif
}

/* ---- Threads: a pool of our own, asleep between calls, so that it takes nothing from torch's ----
 *
 * Parts of a call are claimed from a counter, so a call is complete as soon as its parts are, however many workers
 * came; who computes a part changes no bit of it. One call has the pool at a time: others run by themselves. */

struct call {
    const struct scan *scan;
    kernel *run;
    int64_t group, parts, next;
    unsigned int float_control;
};

static pthread_mutex_t pool_in_use = PTHREAD_MUTEX_INITIALIZER, lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t work_is_there = PTHREAD_COND_INITIALIZER, worker_is_done = PTHREAD_COND_INITIALIZER;
static struct call *current;
static int workers, wanted, active; /* threads of the pool, still to join, at work in the current call */

/* A forked child has none of its parent's threads, and locks that some of them may have held. */
static void forget_pool(void)
{
    pthread_mutex_init(&pool_in_use, NULL);
    pthread_mutex_init(&lock, NULL);
    pthread_cond_init(&work_is_there, NULL);
    pthread_cond_init(&worker_is_done, NULL);
    current = NULL;
    workers = wanted = active = 0;
}

__attribute__((constructor)) static void prepare(void)
{
    instruction_level = best_level();
    pthread_atfork(NULL, NULL, forget_pool);
}

static void work(struct call *call)
{
    const struct scan *scan = call->scan;
    for (;;) {
        int64_t part = __atomic_fetch_add(&call->next, 1, __ATOMIC_RELAXED);
        if (part >= call->parts)
            break;
        int64_t stream = part * call->group;
        int64_t stop = stream + call->group < scan->batch ? stream + call->group : scan->batch;
        for (; stream < stop; stream++)
            call->run(scan, stream);
    }
#ifdef X86_LEVELS
    _mm_sfence(); /* stores that went past the cache are not ordered by a lock */
#endif
}

static void *worker(void *unused)
{
    (void)unused;
    pthread_mutex_lock(&lock);
    for (;;) {
        while (wanted == 0)
            pthread_cond_wait(&work_is_there, &lock);
        struct call *call = current;
        wanted--;
        active++;
        pthread_mutex_unlock(&lock);
#ifdef X86_LEVELS
        _mm_setcsr(call->float_control); /* the caller's choice about subnormal numbers */
#endif
        work(call);
        pthread_mutex_lock(&lock);
        if (--active == 0)
            pthread_cond_signal(&worker_is_done);
    }
    return NULL;
}

/* With `lock` held: start what is missing; with fewer threads, those share the work. */
static void start_workers(int count)
{
    sigset_t all, before;
    if (workers >= count)
        return;
    sigfillset(&all); /* signals belong to the threads of the program */
    pthread_sigmask(SIG_SETMASK, &all, &before);
    while (workers < count) {
        pthread_t thread;
        if (pthread_create(&thread, NULL, worker, NULL) != 0)
            break;
        pthread_detach(thread);
        workers++;
    }
    pthread_sigmask(SIG_SETMASK, &before, NULL);
}

static void share(struct call *call, int threads)
{
    if (threads < 2 || call->parts < 2 || pthread_mutex_trylock(&pool_in_use) != 0) {
        work(call);
        return;
    }
    pthread_mutex_lock(&lock);
    start_workers(threads - 1);
    current = call;
    wanted = workers < threads - 1 ? workers : threads - 1;
    pthread_cond_broadcast(&work_is_there);
    pthread_mutex_unlock(&lock);
    work(call);
    pthread_mutex_lock(&lock);
    wanted = 0;
    while (active > 0)
        pthread_cond_wait(&worker_is_done, &lock);
    current = NULL;
    pthread_mutex_unlock(&lock);
    pthread_mutex_unlock(&pool_in_use);
}

static void run(const struct scan *scan, int pass)
{
    const int64_t row = scan->width * stored_size[scan->type];
    struct scan copy = *scan;
    copy.bypass_cache = scan->bypass_cache && ((scan->h | scan->grad_a | scan->grad_b | row) % LINE) == 0;
    struct call call = {.scan = &copy, .run = kernels[instruction_level][pass][scan->type]};
    int64_t threads = scan->threads < MAX_THREADS ? scan->threads : MAX_THREADS;
    /* Streams of one step are short: several to a part. */
    call.group = scan->batch / (16 * threads) > 0 ? scan->batch / (16 * threads) : 1;
    call.parts = (scan->batch + call.group - 1) / call.group;
#ifdef X86_LEVELS
    call.float_control = _mm_getcsr();
#endif
    share(&call, (int)threads);
}

/* ---- What linear_scan_cpu.py calls ---- */

EXPORT int64_t hf_scan_version(void) { return VERSION; }

EXPORT void hf_scan_forward(const struct scan *scan) { run(scan, FORWARD); }

EXPORT void hf_scan_backward(const struct scan *scan) { run(scan, BACKWARD); }

/* 0: the baseline of this architecture; on x86-64 1: AVX2, 2: AVX-512. Sets the level to at most `level`, if
 * that is not negative, and returns the one in use. */
EXPORT int hf_scan_instruction_level(int level)
{
    int best = best_level();
    if (level >= 0)
        instruction_level = level < best ? level : best;
    return instruction_level;
}

/* Large pages for fresh memory: a tenth of the time goes into providing it. */
EXPORT void hf_scan_use_large_pages(int64_t address, int64_t bytes)
{
#ifdef MADV_HUGEPAGE
    const int64_t page = 1 << 21;
    int64_t first = (address + page - 1) / page * page, stop = (address + bytes) / page * page;
    if (stop > first)
        madvise((void *)first, (size_t)(stop - first), MADV_HUGEPAGE);
#else
    (void)address, (void)bytes;
#endif
}

#elif !defined(LEVEL)

/* ---- Second layer: one element type; once more for each instruction set ---- */

#ifdef X86_LEVELS
#define LEVEL sse2
#define TARGET
#define PUT put_sse2
#include "linear_scan_cpu.c"
#define LEVEL avx2
#define TARGET __attribute__((target("avx2,fma")))
#define PUT put_avx2
#include "linear_scan_cpu.c"
#define LEVEL avx512
#define TARGET TARGET_AVX512
#define PUT put_avx512
#include "linear_scan_cpu.c"
#else
#define LEVEL base
#define TARGET
#define PUT put_base
#include "linear_scan_cpu.c"
#endif
#undef SUFFIX
#undef STORED
#undef STATE
#undef LOAD
#undef SAVE
#undef COMPLEX

#else

/* ---- Third layer: the kernels. A complex element is two numbers next to each other. ---- */

#ifdef COMPLEX
#define NUMBERS 2
#else
#define NUMBERS 1
#endif
/* Numbers of a block: four lines, eight of complex numbers, because GCC unrolls loops of up to 16 rounds before it could
 * vectorise them. */
#define LANES (4 * NUMBERS * LINE / (int)sizeof(STORED))

TARGET INLINE void NAME(put_block)(STORED *target, const STORED *block, int bypass)
{
    for (int j = 0; j < LANES; j += LINE / (int)sizeof(STORED))
        PUT(target + j, block + j, bypass);
}

/* n numbers: state = a * state + b, h = state. */
TARGET INLINE void NAME(forward_row)(
    int n, const STORED *restrict a, const STORED *restrict b, STATE *restrict state, STORED *restrict h)
{
#ifdef COMPLEX
    for (int j = 0; j < n; j += 2) {
        STATE re = a[j] * state[j] - a[j + 1] * state[j + 1] + b[j];
        STATE im = a[j] * state[j + 1] + a[j + 1] * state[j] + b[j + 1];
        h[j] = state[j] = re;
        h[j + 1] = state[j + 1] = im;
    }
#else
    for (int j = 0; j < n; j++) {
        STATE next = LOAD(a[j]) * state[j] + LOAD(b[j]);
        state[j] = next;
        h[j] = SAVE(next);
    }
#endif
}

/* n numbers: total = grad_h + carried, grad_b = total, grad_a = total * conj(previous), carried = total * conj(a).
 * `previous` is h_{t-1}, or before the first step the initial state, which is a STATE. */
#define BACKWARD_ROW(function, PREVIOUS, LOAD_PREVIOUS)                                                               \
    TARGET INLINE void NAME(function)(                                                                                \
        int n, const STORED *restrict a, const PREVIOUS *restrict previous, const STORED *restrict grad_h,            \
        STATE *restrict carried, STORED *restrict grad_a, STORED *restrict grad_b)                                    \
    {                                                                                                                 \
        BACKWARD_BODY(LOAD_PREVIOUS)                                                                                  \
    }
#ifdef COMPLEX
#define BACKWARD_BODY(LOAD_PREVIOUS)                                                                                  \
    for (int j = 0; j < n; j += 2) {                                                                                  \
        STATE re = grad_h[j] + carried[j], im = grad_h[j + 1] + carried[j + 1];                                       \
        grad_b[j] = re;                                                                                               \
        grad_b[j + 1] = im;                                                                                           \
        grad_a[j] = re * previous[j] + im * previous[j + 1];                                                          \
        grad_a[j + 1] = im * previous[j] - re * previous[j + 1];                                                      \
        carried[j] = re * a[j] + im * a[j + 1];                                                                       \
        carried[j + 1] = im * a[j] - re * a[j + 1];                                                                   \
    }
#else
#define BACKWARD_BODY(LOAD_PREVIOUS)                                                                                  \
    for (int j = 0; j < n; j++) {                                                                                     \
        STATE total = LOAD(grad_h[j]) + carried[j];                                                                   \
        grad_b[j] = SAVE(total);                                                                                      \
        grad_a[j] = SAVE(total * LOAD_PREVIOUS(previous[j]));                                                         \
        carried[j] = total * LOAD(a[j]);                                                                              \
    }
#endif
BACKWARD_ROW(backward_row, STORED, LOAD)
BACKWARD_ROW(backward_first_row, STATE, AS_IT_IS)
#undef BACKWARD_BODY
#undef BACKWARD_ROW

TARGET static void NAME(forward)(const struct scan *scan, int64_t stream)
{
    const int64_t width = scan->width * NUMBERS, steps = scan->steps, whole = width / LANES * LANES;
    const STORED *a = (const STORED *)scan->a + stream * scan->a_stream * NUMBERS;
    const STORED *b = (const STORED *)scan->b + stream * scan->b_stream * NUMBERS;
    const uint8_t *resets = scan->resets ? (const uint8_t *)scan->resets + stream * steps : NULL;
    STORED *h = (STORED *)scan->h + stream * steps * width;
    STATE *state = (STATE *)scan->last + stream * width; /* the final state is built in its place */
    const int bypass = (int)scan->bypass_cache;

    memcpy(state, (const STATE *)scan->initial + stream * width, width * sizeof(STATE));
    for (int64_t t = 0; t < steps; t++) {
        if (resets && resets[t])
            memset(state, 0, width * sizeof(STATE));
        for (int64_t i = 0; i < whole; i += LANES) {
            STORED block[LANES];
            NAME(forward_row)(LANES, a + i, b + i, state + i, block);
            NAME(put_block)(h + i, block, bypass);
        }
        NAME(forward_row)((int)(width - whole), a + whole, b + whole, state + whole, h + whole);
        a += scan->a_step * NUMBERS;
        b += scan->b_step * NUMBERS;
        h += width;
    }
}

TARGET static void NAME(backward)(const struct scan *scan, int64_t stream)
{
    const int64_t width = scan->width * NUMBERS, steps = scan->steps, whole = width / LANES * LANES;
    const uint8_t *resets = scan->resets ? (const uint8_t *)scan->resets + stream * steps : NULL;
    const STATE *initial = (const STATE *)scan->initial + stream * width;
    STATE *carried = (STATE *)scan->grad_state + stream * width;
    const int bypass = (int)scan->bypass_cache;

    if (scan->last)
        memcpy(carried, (const STATE *)scan->last + stream * width, width * sizeof(STATE));
    else
        memset(carried, 0, width * sizeof(STATE));
    for (int64_t t = steps - 1; t >= 0; t--) {
        const STORED *a = (const STORED *)scan->a + (stream * scan->a_stream + t * scan->a_step) * NUMBERS;
        const STORED *grad_h = (const STORED *)scan->b + (stream * scan->b_stream + t * scan->b_step) * NUMBERS;
        const int64_t row = (stream * steps + t) * width;
        const STORED *previous = (const STORED *)scan->h + row - width;
        STORED *grad_a = (STORED *)scan->grad_a + row, *grad_b = (STORED *)scan->grad_b + row;

        if (resets && resets[t]) { /* nothing passes between t - 1 and t, not even a NaN */
            for (int64_t i = 0; i < width; i++)
                grad_b[i] = SAVE(LOAD(grad_h[i]) + carried[i]);
            memset(grad_a, 0, width * sizeof(STORED));
            memset(carried, 0, width * sizeof(STATE));
            continue;
        }
        if (t == 0) {
            for (int64_t i = 0; i < whole; i += LANES)
                NAME(backward_first_row)(LANES, a + i, initial + i, grad_h + i, carried + i, grad_a + i, grad_b + i);
            NAME(backward_first_row)(
                (int)(width - whole), a + whole, initial + whole, grad_h + whole, carried + whole, grad_a + whole,
                grad_b + whole);
            continue;
        }
        NAME(backward_row)(
            (int)(width - whole), a + whole, previous + whole, grad_h + whole, carried + whole, grad_a + whole,
            grad_b + whole);
        for (int64_t i = whole - LANES; i >= 0; i -= LANES) {
            STORED block_a[LANES], block_b[LANES];
            NAME(backward_row)(LANES, a + i, previous + i, grad_h + i, carried + i, block_a, block_b);
            NAME(put_block)(grad_b + i, block_b, bypass);
            NAME(put_block)(grad_a + i, block_a, bypass);
        }
    }
}

#undef NUMBERS
#undef LANES
#undef LEVEL
#undef TARGET
#undef PUT

#endif

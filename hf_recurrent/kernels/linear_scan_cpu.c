/* The linear recurrence h_t = a_t * h_{t-1} + b_t and its gradients on a CPU.
 *
 * Plain C without Python.h: linear_scan_cpu.py checks the tensors and passes pointers. One thread takes a stream
 * at a time. Its state stays in the inner cache while whole rows of a, b and h go past once: upwards in the forward
 * pass, strictly downwards in the backward one (1.7 times as fast as downwards by rows but upwards within each).
 * Rows are not split among threads: two halves by two threads took longer than the whole by one, because only
 * sequential reads are fast.
 */
#include "kernel.h"
#include "thread_pool.h"

#define LINE 64       /* bytes of a cache line */

/* What linear_scan_cpu.py packs; raise VERSION with every change. Pointers are integers; strides count elements. The
 * forward pass reads a, b and writes h and last; the backward pass reads a, b (the gradient of h), h, last (the
 * gradient of the final state, or null) and writes grad_a, grad_b and grad_state. */
#define VERSION 3
struct scan {
    int64_t type, threads, bypass_cache, batch, steps, width;
    int64_t a, a_stream, a_step, b, b_stream, b_step;
    int64_t initial, resets, h, last, grad_a, grad_b, grad_state;
};

typedef void kernel(const struct scan *scan, int64_t stream);

#include "linear_scan_elements.h"

#define SUFFIX float32
#define STORED float
#define STATE float
#define LOAD AS_IT_IS
#define SAVE AS_IT_IS
#include "linear_scan_levels.h"

#define SUFFIX float64
#define STORED double
#define STATE double
#define LOAD AS_IT_IS
#define SAVE AS_IT_IS
#include "linear_scan_levels.h"

#define SUFFIX bfloat16
#define STORED uint16_t
#define STATE float
#define LOAD from_bfloat16
#define SAVE to_bfloat16
#include "linear_scan_levels.h"

#define SUFFIX float16
#define STORED uint16_t
#define STATE float
#define LOAD from_float16
#define SAVE to_float16
#include "linear_scan_levels.h"

#define COMPLEX
#define SUFFIX complex64
#define STORED float
#define STATE float
#define LOAD AS_IT_IS
#define SAVE AS_IT_IS
#include "linear_scan_levels.h"

#define COMPLEX
#define SUFFIX complex128
#define STORED double
#define STATE double
#define LOAD AS_IT_IS
#define SAVE AS_IT_IS
#include "linear_scan_levels.h"

/* For many steps: the rounding of a state in float32 adds up where it decays slowly. */
#define SUFFIX wide_float32
#define STORED float
#define STATE double
#define LOAD (double)
#define SAVE (float)
#include "linear_scan_levels.h"

#define COMPLEX
#define SUFFIX wide_complex64
#define STORED float
#define STATE double
#define LOAD (double)
#define SAVE (float)
#include "linear_scan_levels.h"

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

__attribute__((constructor)) static void prepare(void) { instruction_level = best_level(); }

struct job {
    struct scan scan;
    kernel *run;
    int64_t group; /* streams of a part */
};

static void run_part(const void *argument, int64_t part)
{
    const struct job *job = argument;
    const int64_t first = part * job->group, end = first + job->group;
    for (int64_t stream = first; stream < end && stream < job->scan.batch; stream++)
        job->run(&job->scan, stream);
#ifdef X86_LEVELS
    _mm_sfence(); /* stores that went past the cache are not ordered otherwise */
#endif
}

static void run(const struct scan *scan, int pass)
{
    const int64_t row = scan->width * stored_size[scan->type];
    struct job job = {.scan = *scan, .run = kernels[instruction_level][pass][scan->type]};
    job.scan.bypass_cache = scan->bypass_cache && ((scan->h | scan->grad_a | scan->grad_b | row) % LINE) == 0;
    /* Streams of one step are short: several to a part. */
    job.group = scan->batch / (16 * scan->threads) > 0 ? scan->batch / (16 * scan->threads) : 1;
    struct call call = {.run = run_part, .argument = &job, .parts = (scan->batch + job.group - 1) / job.group};
    share(&call, scan->threads);
}

/* ---- What linear_scan_cpu.py calls ---- */

EXPORT int64_t hf_scan_version(void) { return VERSION; }

EXPORT_USE_POOL(scan)

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

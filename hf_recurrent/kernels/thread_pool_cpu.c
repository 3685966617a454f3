/* The threads of all kernels: a pool of our own, asleep between calls, or the threads of an OpenMP library.
 *
 * One call has the pool at a time: others run by themselves. A worker that comes late finds nothing to do, and nobody
 * waits for it, so a busy core costs its share of the work and no more. OpenMP's threads are used where they wait in a
 * loop after each of torch's operations: threads of our own would share the cores with that loop.
 */
#include "kernel.h"
#define POOL
#include "thread_pool.h"
#include <pthread.h>
#include <signal.h>
#include <time.h>

#define VERSION 1
/* Nanoseconds. A thread that sleeps takes up to a tenth of a millisecond to wake up, as long as a call. So a worker looks
 * for the next call, and a call for its last worker, in a loop before it sleeps; not while the cores are busy. */
#define SPIN 300000
#define NAP 50000
/* On busy cores a worker keeps the others waiting for the time slice of another program, or takes their core from them.
 * A thread that works loses the time in which it does not run. After a loss of more than LOST, and of an eighth of the
 * call, calls are computed by their own thread for FIRST_PAUSE; the next pause is twice as long if that happens again,
 * and a third as long after RECOVERY in calls without a loss. */
#define LOST 200000
#define FIRST_PAUSE 4000000
#define LONGEST_PAUSE 500000000
#define RECOVERY 128000000

typedef void parallel(void (*function)(void *), void *argument, unsigned threads, unsigned flags); /* GOMP_parallel */

static parallel *team;
static pthread_mutex_t pool_in_use = PTHREAD_MUTEX_INITIALIZER, lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t work_is_there = PTHREAD_COND_INITIALIZER;
static struct call *current;
static int workers;  /* threads of the pool; changed by the call that has the pool */
static int wanted;   /* workers that may still join the current call */
static int finished; /* workers that have joined it and are done */
static int asleep;   /* workers that wait for a signal */
static int64_t lost; /* nanoseconds that a thread of the call has lost, the most of all */
static int64_t pause_length = FIRST_PAUSE, paused_until;

#define GET(x) __atomic_load_n(&(x), __ATOMIC_SEQ_CST)
#define SET(x, value) __atomic_store_n(&(x), value, __ATOMIC_SEQ_CST)

static int64_t nanoseconds(clockid_t clock)
{
    struct timespec time;
    clock_gettime(clock, &time);
    return time.tv_sec * 1000000000LL + time.tv_nsec;
}

static int64_t now(void) { return nanoseconds(CLOCK_MONOTONIC); }

/* A forked child has none of its parent's threads, nor OpenMP's, and locks that some of them may have held. */
static void forget_pool(void)
{
    team = NULL;
    pthread_mutex_init(&pool_in_use, NULL);
    pthread_mutex_init(&lock, NULL);
    pthread_cond_init(&work_is_there, NULL);
    current = NULL;
    workers = wanted = finished = asleep = 0;
}

__attribute__((constructor)) static void prepare(void) { pthread_atfork(NULL, NULL, forget_pool); }

/* Looks at `value` until it is not `old` any more, or for a while; true if it changed. */
static int changes(const int *value, int old)
{
    const int64_t begin = now();
    for (int i = 1; __atomic_load_n(value, __ATOMIC_SEQ_CST) == old; i++) {
#ifdef X86_LEVELS
        _mm_pause();
#endif
        if (i % 64)
            continue;
        const int64_t time = now();
        if (time - begin > SPIN || time < GET(paused_until))
            return 0;
    }
    return 1;
}

static void work(void *argument)
{
    struct call *call = argument;
#ifdef X86_LEVELS
    const unsigned int own = _mm_getcsr();
    _mm_setcsr(call->float_control); /* the caller's choice about subnormal numbers */
#endif
    for (;;) {
        const int64_t part = __atomic_fetch_add(&call->next, 1, __ATOMIC_RELAXED);
        if (part >= call->parts)
            break;
        call->run(call->argument, part);
    }
#ifdef X86_LEVELS
    _mm_setcsr(own);
#endif
}

/* As `work`; the time in which this thread did not run goes to `lost`. */
static void work_by_the_clock(struct call *call)
{
    const int64_t begin = now(), run = nanoseconds(CLOCK_THREAD_CPUTIME_ID);
    work(call);
    const int64_t own = now() - begin - (nanoseconds(CLOCK_THREAD_CPUTIME_ID) - run);
    for (int64_t most = GET(lost); own > most;)
        if (__atomic_compare_exchange_n(&lost, &most, own, 0, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST))
            break;
}

static void *worker(void *unused)
{
    (void)unused;
    for (;;) {
        if (!changes(&wanted, 0)) {
            pthread_mutex_lock(&lock);
            SET(asleep, asleep + 1);
            while (GET(wanted) == 0)
                pthread_cond_wait(&work_is_there, &lock);
            SET(asleep, asleep - 1);
            pthread_mutex_unlock(&lock);
        }
        int left = GET(wanted);
        if (left > 0 && __atomic_compare_exchange_n(&wanted, &left, left - 1, 0, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST)) {
            work_by_the_clock(current); /* the call waits for those that have joined */
            __atomic_fetch_add(&finished, 1, __ATOMIC_SEQ_CST);
        }
    }
    return NULL;
}

/* Start what is missing; with fewer threads, those share the work. */
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

static void share_in_pool(struct call *call, int threads)
{
    if (pthread_mutex_trylock(&pool_in_use) != 0) {
        work(call);
        return;
    }
    const int64_t begin = now();
    if (begin < paused_until) {
        pthread_mutex_unlock(&pool_in_use);
        work(call);
        return;
    }
    start_workers(threads - 1);
    const int offered = workers < threads - 1 ? workers : threads - 1;
    current = call;
    finished = 0;
    SET(lost, 0);
    SET(wanted, offered);
    if (GET(asleep)) {
        pthread_mutex_lock(&lock);
        pthread_cond_broadcast(&work_is_there);
        pthread_mutex_unlock(&lock);
    }
    work_by_the_clock(call);
    const int joined = offered - __atomic_exchange_n(&wanted, 0, __ATOMIC_SEQ_CST);
    for (int seen; (seen = GET(finished)) < joined;)
        if (!changes(&finished, seen))
            nanosleep(&(struct timespec){.tv_nsec = NAP}, NULL);
    const int64_t time = now();
    if (GET(lost) > LOST + (time - begin) / 8) {
        SET(paused_until, time + pause_length);
        pause_length = 2 * pause_length < LONGEST_PAUSE ? 2 * pause_length : LONGEST_PAUSE;
    } else if (pause_length > FIRST_PAUSE)
        pause_length -= pause_length * (time - begin < RECOVERY / 2 ? time - begin : RECOVERY / 2) / RECOVERY;
    pthread_mutex_unlock(&pool_in_use);
}

/* ---- What thread_pool.py calls ---- */

EXPORT int64_t hf_pool_version(void) { return VERSION; }

EXPORT void hf_pool_use_team(parallel *function) { team = function; }

EXPORT void hf_pool_share(struct call *call, int64_t threads)
{
    call->next = 0;
#ifdef X86_LEVELS
    call->float_control = _mm_getcsr();
#endif
    if (threads > call->parts)
        threads = call->parts;
    if (team)
        team(work, call, (unsigned)threads, 0);
    else
        share_in_pool(call, (int)(threads < 256 ? threads : 256));
}

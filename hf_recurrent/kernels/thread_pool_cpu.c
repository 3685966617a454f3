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

#define VERSION 1
#define SPINS 1000 /* looks at the next call, or at the last worker, before a thread sleeps: about ten microseconds */

typedef void parallel(void (*function)(void *), void *argument, unsigned threads, unsigned flags); /* GOMP_parallel */

static parallel *team;
static pthread_mutex_t pool_in_use = PTHREAD_MUTEX_INITIALIZER, lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t work_is_there = PTHREAD_COND_INITIALIZER, worker_is_done = PTHREAD_COND_INITIALIZER;
static struct call *current;
static int workers, wanted, active; /* threads of the pool, still to join, at work in the current call */

/* A forked child has none of its parent's threads, nor OpenMP's, and locks that some of them may have held. */
static void forget_pool(void)
{
    team = NULL;
    pthread_mutex_init(&pool_in_use, NULL);
    pthread_mutex_init(&lock, NULL);
    pthread_cond_init(&work_is_there, NULL);
    pthread_cond_init(&worker_is_done, NULL);
    current = NULL;
    workers = wanted = active = 0;
}

__attribute__((constructor)) static void prepare(void) { pthread_atfork(NULL, NULL, forget_pool); }

static void spin_while(const int *value, int is_zero)
{
    for (int i = 0; i < SPINS && (__atomic_load_n(value, __ATOMIC_RELAXED) == 0) == is_zero; i++)
#ifdef X86_LEVELS
        _mm_pause();
#else
        ;
#endif
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
    _mm_sfence(); /* stores that went past the cache are not ordered by a lock */
#endif
}

static void *worker(void *unused)
{
    (void)unused;
    for (;;) {
        spin_while(&wanted, 1);
        pthread_mutex_lock(&lock);
        while (wanted == 0)
            pthread_cond_wait(&work_is_there, &lock);
        struct call *call = current;
        wanted--;
        active++;
        pthread_mutex_unlock(&lock);
        work(call);
        pthread_mutex_lock(&lock);
        if (--active == 0)
            pthread_cond_signal(&worker_is_done);
        pthread_mutex_unlock(&lock);
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

static void share_in_pool(struct call *call, int threads)
{
    if (pthread_mutex_trylock(&pool_in_use) != 0) {
        work(call);
        return;
    }
    pthread_mutex_lock(&lock);
    start_workers(threads - 1);
    current = call;
    __atomic_store_n(&wanted, workers < threads - 1 ? workers : threads - 1, __ATOMIC_RELAXED);
    pthread_cond_broadcast(&work_is_there);
    pthread_mutex_unlock(&lock);
    work(call);
    spin_while(&active, 0);
    pthread_mutex_lock(&lock);
    wanted = 0;
    while (active > 0)
        pthread_cond_wait(&worker_is_done, &lock);
    current = NULL;
    pthread_mutex_unlock(&lock);
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

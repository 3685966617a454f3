/* The threads of scans: a pool of our own, asleep between calls, so that it takes nothing from torch's.
 *
 * Parts of a call are claimed from a counter, so a call is complete as soon as its parts are, however many workers
 * came; who computes a part changes no bit of it. One call has the pool at a time: others run by themselves. */

#include <pthread.h>
#include <signal.h>

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

/* Parts of a call that threads claim from a counter: a call is complete as soon as its parts are, however many threads
 * came, and who computes a part changes no bit of it. */
struct call {
    void (*run)(const void *argument, int64_t part);
    const void *argument;
    int64_t parts;
    int64_t next; /* these two belong to the pool */
    unsigned int float_control;
};
typedef void share_function(struct call *call, int64_t threads);

#ifndef POOL
/* Of thread_pool_cpu.c, a library of its own, so that all kernels have one pool; null until a kernel is given it. */
static share_function *share_among_threads;

#define EXPORT_USE_POOL(name) \
    EXPORT void hf_##name##_use_pool(share_function *function) { share_among_threads = function; }

INLINE void share(struct call *call, int64_t threads)
{
    if (share_among_threads && threads > 1 && call->parts > 1)
        share_among_threads(call, threads);
    else
        for (int64_t part = 0; part < call->parts; part++)
            call->run(call->argument, part);
}
#endif

/* The count memory with more contexts and sets of weights: better predictions in three times the time. */
#define LARGE
#include "count_memory_cpu.c"

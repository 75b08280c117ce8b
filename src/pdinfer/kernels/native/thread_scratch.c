#include "thread_scratch.h"

#include <pthread.h>
#include <stdlib.h>

typedef struct {
    void *at;
    int64_t size;
} Scratch;

static _Thread_local Scratch scratches[NUM_SCRATCHES];
static pthread_once_t once = PTHREAD_ONCE_INIT;
static pthread_key_t key;
static int key_works;

static void give_back(void *of_thread) {
    for (int i = 0; i < NUM_SCRATCHES; i++) free(((Scratch *)of_thread)[i].at);
}

static void make_key(void) { key_works = !pthread_key_create(&key, give_back); }

void *thread_scratch(int which, int64_t bytes) {
    Scratch *mine = scratches + which;
    if (!mine->at || bytes > mine->size) {
        /* C has no destructor of thread-local variables: the key is there to have one, and holds nothing. */
        pthread_once(&once, make_key);
        if (key_works) pthread_setspecific(key, scratches);
        free(mine->at); /* before the larger one is there: the two together may be more than there is */
        *mine = (Scratch){0};
        void *at;
        if (posix_memalign(&at, 64, bytes > 64 ? bytes : 64)) return NULL;
        *mine = (Scratch){at, bytes};
    }
    return mine->at;
}

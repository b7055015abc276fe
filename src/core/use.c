/* use.c - uses against evictions: many uses at once, or one caller alone.
 *
 * Whoever wants to be alone is waited for by new uses, so a stream of requests cannot keep an
 * eviction out. A use may wait for a restore: restores need no use and are cancelled only by a
 * caller that is alone, so that wait always ends. A thread must not begin a use, nor want to be
 * alone, within a use of its own. */
#include <assert.h>

#include "core_int.h"

void neap_use_begin(neap_engine *engine, int kind) {
    pthread_mutex_lock(&engine->use_lock);
    while (engine->alone || engine->n_waiting_alone > 0)
        pthread_cond_wait(&engine->use_changed, &engine->use_lock);
    engine->n_uses++;
    engine->n_computing += kind == NEAP_USE_COMPUTE;
    pthread_mutex_unlock(&engine->use_lock);
}

void neap_use_end(neap_engine *engine, int kind) {
    pthread_mutex_lock(&engine->use_lock);
    assert(engine->n_uses > 0);
    engine->n_uses--;
    engine->n_computing -= kind == NEAP_USE_COMPUTE;
    if (engine->n_uses == 0 && engine->n_waiting_alone > 0)
        pthread_cond_broadcast(&engine->use_changed);
    if (engine->n_uses == 0 && engine->idle) neap_idle_used(engine->idle);
    pthread_mutex_unlock(&engine->use_lock);
    neap_settle(engine, kind == NEAP_USE_COMPUTE);
}

void neap_alone_begin(neap_engine *engine, bool to_evict) {
    pthread_mutex_lock(&engine->use_lock);
    engine->n_waiting_alone++;
    while (engine->alone || engine->n_uses > 0)
        pthread_cond_wait(&engine->use_changed, &engine->use_lock);
    engine->n_waiting_alone--;
    engine->alone = true;
    engine->n_alone++;
    engine->evicting = to_evict;
    pthread_mutex_unlock(&engine->use_lock);
}

void neap_alone_end(neap_engine *engine) {
    pthread_mutex_lock(&engine->use_lock);
    engine->alone = engine->evicting = false;
    pthread_cond_broadcast(&engine->use_changed);
    pthread_mutex_unlock(&engine->use_lock);
}

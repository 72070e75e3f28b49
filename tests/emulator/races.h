// Which accesses to memory nothing orders: vector clocks per thread, epochs per word, as FastTrack has them (Flanagan and Freund,
// PLDI 2009). Included by machine.h, for launches that are watched.
//
//   who        has a clock for every thread of the grid: how far it knows of that thread
//   orders     named barriers, barriers of the cluster and of a warp; an mbarrier, from those who arrive to who sees its phase end;
//              the copy engine, from who asks for a copy to its mbarrier; a word that is released and acquired, by itself or by
//              fences around relaxed accesses; the wait for products, of a warp's threads
//   a race     two accesses to a byte by threads of which neither is ordered behind the other, at least one of them a store that
//              is no atomic one. (A plain load beside atomics gives one of their values, and is none; a store of what is there
//              already changes nothing.)
//
// A word that a copy fills is written by who asked for it, at the time it did; a product reads at the time it is computed.

enum { LOADS = 1, STORES = 2, STRONG = 4, ACQUIRES = 8, RELEASES = 16, SAME = 32 }; // SAME: a store of what is there already
enum { MOST_WRITERS = 4, MOST_READERS = 12 };

typedef struct {
  uint32_t clock; // 0: none
  uint16_t thread, place;
  uint8_t bytes, how; // of the word
} Epoch;

typedef struct {
  Epoch writes[MOST_WRITERS], reads[MOST_READERS];
} Word;

typedef struct {
  uint64_t address; // 0: free
  uint32_t *known; // what was released there, or 0
  Word word;
} Place;

typedef struct {
  int threads; // of the grid
  uint32_t *clocks; // (threads, threads)
  uint32_t *fenced, *pending; // likewise: what a thread knew at its last fence; what it may know after the next
  Place *places; // an open table, by address
  uint64_t many, used;
} Watch;

static Watch *watch_of(int threads) {
  Watch *v = calloc(1, sizeof(Watch));
  v->threads = threads, v->many = 1 << 16;
  v->clocks = calloc((size_t)threads * threads, 4);
  v->fenced = calloc((size_t)threads * threads, 4);
  v->pending = calloc((size_t)threads * threads, 4);
  v->places = calloc(v->many, sizeof(Place));
  for (int t = 0; t < threads; t++) v->clocks[(size_t)t * threads + t] = 1;
  return v;
}

static void forget(Watch *v) {
  if (!v) return;
  for (uint64_t n = 0; n < v->many; n++) free(v->places[n].known);
  free(v->clocks), free(v->fenced), free(v->pending), free(v->places), free(v);
}

static Place *place_of(Watch *v, uint64_t address) {
  if (2 * v->used > v->many) {
    Place *old = v->places;
    uint64_t many = v->many;
    v->many *= 2, v->used = 0, v->places = calloc(v->many, sizeof(Place));
    for (uint64_t n = 0; n < many; n++)
      if (old[n].address) *place_of(v, old[n].address) = old[n];
    free(old);
  }
  uint64_t n = (address * 0x9E3779B97F4A7C15ull) >> 20 & (v->many - 1);
  while (v->places[n].address && v->places[n].address != address) n = (n + 1) & (v->many - 1);
  if (!v->places[n].address) v->places[n].address = address, v->used++;
  return &v->places[n];
}

static uint32_t *clocks_of(Watch *v, int thread) { return v->clocks + (size_t)thread * v->threads; }

static void join(Watch *v, uint32_t *to, const uint32_t *from) {
  for (int n = 0; n < v->threads; n++)
    if (from[n] > to[n]) to[n] = from[n];
}

static uint32_t *room(Watch *v, uint32_t **clocks) {
  if (!*clocks) *clocks = calloc(v->threads, 4);
  return *clocks;
}

static void tell(Watch *v, int thread, uint32_t **to) { // what it knows, to whoever learns from there
  join(v, room(v, to), clocks_of(v, thread));
  clocks_of(v, thread)[thread]++;
}

static void learn(Watch *v, int thread, const uint32_t *from) {
  if (from) join(v, clocks_of(v, thread), from);
}

static void fence(Watch *v, int thread) {
  uint32_t *own = clocks_of(v, thread), *pending = v->pending + (size_t)thread * v->threads;
  join(v, own, pending);
  memcpy(v->fenced + (size_t)thread * v->threads, own, 4 * v->threads);
  own[thread]++;
}

static int races(const Epoch *before, const uint32_t *known, int thread, int bytes, int how) {
  if (!before->clock || !(before->bytes & bytes) || before->thread == thread || before->clock <= known[before->thread]) return 0;
  int both = before->how & how, either = before->how | how;
  if (both & STRONG || how & SAME) return 0;
  return !(either & STRONG && (before->how & STRONG ? how : before->how) == LOADS); // a plain load beside an atomic one
}

static void put(Epoch *epochs, int many, Epoch epoch, const uint32_t *known) { // in place of one that it is ordered behind
  int at = -1;
  for (int n = 0; n < many; n++) {
    if (epochs[n].clock && epochs[n].thread == epoch.thread && epochs[n].how == epoch.how && !(epochs[n].bytes & ~epoch.bytes)) {
      epochs[n] = epoch;
      return;
    }
    int over = !epochs[n].clock || (epochs[n].clock <= known[epochs[n].thread] && !(epochs[n].bytes & ~epoch.bytes));
    if (at < 0 && over) at = n;
  }
  epochs[at < 0 ? epoch.clock % many : at] = epoch;
}

// The access with which this one races, or 0. ``known``: by when, which is the thread's now or, of a copy, then.
static const Epoch *accessed(Watch *v, const uint32_t *known, int thread, int place, uint64_t address, int size, int how) {
  static _Thread_local Epoch found;
  for (uint64_t at = address & ~3ull; at < address + size; at += 4) {
    int bytes = 0;
    for (int n = 0; n < 4; n++) bytes |= (at + n >= address && at + n < address + size) << n;
    Word *word = &place_of(v, at)->word;
    for (int n = 0; n < MOST_WRITERS + (how & STORES ? MOST_READERS : 0); n++) {
      const Epoch *before = n < MOST_WRITERS ? &word->writes[n] : &word->reads[n - MOST_WRITERS];
      if (races(before, known, thread, bytes, how)) {
        found = *before;
        return &found;
      }
    }
    Epoch epoch = {known[thread], thread, place, bytes, how & (LOADS | STORES | STRONG)};
    if (how & STORES) put(word->writes, MOST_WRITERS, epoch, known);
    else put(word->reads, MOST_READERS, epoch, known);
  }
  return 0;
}

static void ordered(Watch *v, int thread, uint64_t address, int how) { // what a strong access tells and learns
  Place *place = place_of(v, address & ~7ull);
  uint32_t *fenced = v->fenced + (size_t)thread * v->threads, *pending = v->pending + (size_t)thread * v->threads;
  if (how & LOADS && place->known) {
    if (how & ACQUIRES) learn(v, thread, place->known);
    else join(v, pending, place->known);
  }
  if (how & STORES) {
    if (!(how & LOADS)) free(place->known), place->known = 0; // a plain store ends what was released before
    if (how & RELEASES) tell(v, thread, &place->known);
    else join(v, room(v, &place->known), fenced);
  }
}

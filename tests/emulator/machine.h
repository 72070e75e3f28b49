// What a Hopper GPU is to the functions that translate.py writes: see __init__.py.
//
//   Machine   a launch: its CTAs, the copies on their way, what memory belongs to tensors, the seed
//   Cta       shared memory and named barriers
//   Warp      32 threads, and the products that they have asked for
//   Thread    registers, local memory, and its place: the number of the stretch it takes next
//
// An mbarrier is a word of shared memory, as on the GPU: bit 0 the parity of its phase, 15 bits how many arrive in a phase, 16 how
// many are still to, 32 how many bytes are still to come.

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "races.h"

enum { RUNNING, DONE, FAILED };
enum { EXITED = -1, SHARED_BASE = 1024, SHARED_BYTES = 232448, NAMED_BARRIERS = 16, MOST_PRODUCTS = 256, MOST_COPIES = 4096 };

typedef struct Thread {
  int place, number;
  struct Warp *warp;
  uint8_t p[P_REGISTERS];
  uint16_t h[H_REGISTERS];
  uint32_t r[R_REGISTERS];
  uint64_t d[D_REGISTERS];
  _Alignas(16) char local[LOCAL_BYTES];
} Thread;

typedef struct {
  const uint16_t *accumulator; // registers
  int columns, accumulate, is_bf16, group;
  uint64_t a, b; // descriptors
} Product;

typedef struct Warp {
  Thread threads[32];
  struct Cta *cta;
  int number, yields;
  int arrived, phase; // at a barrier of CTA or cluster, and what its phase was
  Product products[MOST_PRODUCTS];
  int many_products, group; // committed so far
} Warp;

typedef struct {
  int arrived, phase, votes, sum; // threads of this phase; of the last one, how many voted yes
  uint32_t *told, *known; // clocks of this phase, and of the last one
} Named;

typedef struct Cta {
  struct Machine *machine;
  int number, rank; // of the grid, of the cluster
  Warp *warps;
  char *shared; // at SHARED_BASE
  Named named[NAMED_BARRIERS];
} Cta;

// What the host writes in place of a CUtensorMap: two dimensions of 16-bit elements, swizzled by 128 bytes.
typedef struct {
  uint64_t address, rows_apart; // bytes
  int32_t columns, rows, box_columns, box_rows;
} Tensor;

typedef struct {
  const Tensor *tensor;
  int x, y, rank, first_cta; // of a cluster
  uint32_t to, barrier, mask;
  int thread, place; // who asked
  uint32_t *known; // and what it knew then
} Copy;

typedef struct {
  uint64_t start, end;
} Range;

typedef struct Machine {
  char parameters[PARAMETER_BYTES + 64];
  int ctas, cluster;
  Cta *all;
  const Range *ranges; // sorted; none: any address is good
  int many_ranges;
  uint64_t random, rounds;
  int late; // of 8 groups of products how many are computed as late as can be
  int sloppy; // units in the last place by which approximate instructions are off at most
  Copy copies[MOST_COPIES];
  int many_copies;
  Named *clusters;
  Watch *watch; // or none
  uint64_t *executed; // instructions, by warp: those of all of its threads
  Warp **queue; // those that have not ended
  int living;
  jmp_buf failed;
  char *error;
  int error_bytes;
} Machine;

typedef struct {
  int (*go)(Thread *);
  int (*meet)(Warp *, uint32_t);
} Stretch;

extern const Stretch STRETCHES[];
extern const int SIZES[]; // how many instructions each has
extern const int MANY_STRETCHES;

#define EACH(group)                     \
  for (int lane = 0; lane < 32; lane++) \
    for (Thread *t = &w->threads[lane]; t && ((group) >> lane & 1); t = 0)

static void fail(Machine *m, const char *format, ...) {
  va_list values;
  va_start(values, format);
  vsnprintf(m->error, m->error_bytes, format, values);
  va_end(values);
  longjmp(m->failed, 1);
}

static void fail_at(Thread *t, const char *what, uint64_t address, int size) {
  Cta *cta = t->warp->cta;
  fail(cta->machine, "%s: %d bytes at %#llx, by thread %d of CTA %d at stretch %d", what, size, (unsigned long long)address,
       t->number, cta->number, t->place);
}

static uint32_t draw(Machine *m, uint32_t below) { // xorshift
  m->random ^= m->random << 13, m->random ^= m->random >> 7, m->random ^= m->random << 17;
  return (uint32_t)((m->random >> 32) % below);
}

static uint64_t now(Thread *t) { return t->warp->cta->machine->rounds * 1000; } // nanoseconds

static uint32_t living(Warp *w) {
  uint32_t alive = 0;
  for (int lane = 0; lane < 32; lane++) alive |= (uint32_t)(w->threads[lane].place != EXITED) << lane;
  return alive;
}

// -- who is ordered behind whom

static int number_of(Thread *t) { return t->warp->cta->number * THREADS + t->number; }

static void fail_of_race(Machine *m, const Epoch *before, int thread, int place, int how, const char *what, uint64_t address) {
  fail(m, "a race at %s %#llx: a %s by thread %d of CTA %d at stretch %d, and before it a %s by thread %d of CTA %d at stretch %d", what,
       (unsigned long long)address, how & STORES ? "store" : "load", thread % THREADS, thread / THREADS, place,
       before->how & STORES ? "store" : "load", before->thread % THREADS, before->thread / THREADS, before->place);
}

static void *watched(Thread *t, void *at, int size, int how, const void *values, const char *what, uint64_t address) {
  Watch *v = t->warp->cta->machine->watch;
  if (!v) return at;
  if (values && !memcmp(at, values, size)) how |= SAME;
  int thread = number_of(t);
  const Epoch *before = accessed(v, clocks_of(v, thread), thread, t->place, (uint64_t)(uintptr_t)at, size, how);
  if (before) fail_of_race(t->warp->cta->machine, before, thread, t->place, how, what, address);
  if (how & STRONG) ordered(v, thread, (uint64_t)(uintptr_t)at, how);
  return at;
}

static void fenced(Thread *t) {
  if (t->warp->cta->machine->watch) fence(t->warp->cta->machine->watch, number_of(t));
}

static void meet(Warp *w, uint32_t group) { // threads of a warp
  Watch *v = w->cta->machine->watch;
  if (!v) return;
  uint32_t *all = calloc(v->threads, 4);
  EACH(group) join(v, all, clocks_of(v, number_of(t)));
  EACH(group) memcpy(clocks_of(v, number_of(t)), all, 4 * v->threads), clocks_of(v, number_of(t))[number_of(t)]++;
  free(all);
}

// -- memory

static int belongs(Machine *m, uint64_t address, int size) {
  int low = 0, high = m->many_ranges;
  while (low < high) { // the first range that ends behind it
    int middle = (low + high) / 2;
    if (m->ranges[middle].end < address + size) low = middle + 1;
    else high = middle;
  }
  return low < m->many_ranges && m->ranges[low].start <= address;
}

static void *global_at(Thread *t, uint64_t address, int size, int how, const void *values) { // values: that will be stored, or 0
  Machine *m = t->warp->cta->machine;
  if (address % size) fail_at(t, "global memory, not aligned", address, size);
  if (m->many_ranges && !belongs(m, address, size)) fail_at(t, "global memory of no tensor", address, size);
  return watched(t, (void *)(uintptr_t)address, size, how, values, "global memory", address);
}

static Cta *cta_of(Cta *own, uint32_t address) { // of an address of the cluster's shared memory; with no rank, its own
  uint32_t rank = address >> 24;
  return rank ? own - own->rank + (rank - 1) : own;
}

static void *shared_of(Cta *own, uint32_t address, int size) {
  uint32_t place = address & 0xFFFFFF;
  if (place < SHARED_BASE || place + size > SHARED_BASE + SHARED_BYTES || place % size) return 0;
  return cta_of(own, address)->shared + (place - SHARED_BASE);
}

static void *shared_at(Thread *t, uint32_t address, int size, int how, const void *values) { // how: 0, of a barrier
  void *at = shared_of(t->warp->cta, address, size);
  if (!at) fail_at(t, "shared memory", address, size);
  return how ? watched(t, at, size, how, values, "shared memory", address) : at;
}

static uint32_t shared_address(Thread *t, uint64_t generic) {
  uint64_t place = generic - (uint64_t)(uintptr_t)t->warp->cta->shared;
  if (place >= SHARED_BYTES) fail_at(t, "generic address of no shared memory", generic, 1);
  return (uint32_t)place + SHARED_BASE;
}

static void *local_at(Thread *t, uint64_t address, int size) {
  if (address + size > LOCAL_BYTES || address % size) fail_at(t, "local memory", address, size);
  return t->local + address;
}

// -- mbarriers. Who arrives tells whoever sees the phase end: clocks are kept one byte behind the barrier until then, and two behind.

static uint64_t *barrier_at(Thread *t, uint32_t address) { return shared_at(t, address, 8, 0, 0); }

static void barrier_init(Thread *t, uint32_t address, uint32_t count) {
  *barrier_at(t, address) = (uint64_t)count << 1 | (uint64_t)count << 16;
}

static uint32_t **clocks_at(Watch *v, uint64_t *barrier, int behind) { return &place_of(v, (uint64_t)(uintptr_t)barrier + behind)->known; }

static void barrier_change(Machine *m, uint64_t *barrier, int arrivals, int32_t bytes) { // bytes: more, or fewer, still to come
  uint64_t count = *barrier >> 1 & 0x7FFF;
  int64_t pending = (int64_t)(*barrier >> 16 & 0xFFFF) - arrivals;
  int32_t expected = (int32_t)(*barrier >> 32) + bytes;
  uint64_t parity = *barrier & 1;
  if (pending < 0) fail(m, "more arrive at a barrier than %d", (int)count);
  if (!pending && !expected) {
    parity ^= 1, pending = count;
    if (m->watch) {
      uint32_t *told = *clocks_at(m->watch, barrier, 1);
      *clocks_at(m->watch, barrier, 1) = 0;
      free(*clocks_at(m->watch, barrier, 2));
      *clocks_at(m->watch, barrier, 2) = told;
    }
  }
  *barrier = parity | count << 1 | (uint64_t)pending << 16 | (uint64_t)(uint32_t)expected << 32;
}

static void barrier_arrive(Thread *t, uint32_t address, uint32_t arrivals, uint32_t bytes) {
  Machine *m = t->warp->cta->machine;
  uint64_t *barrier = barrier_at(t, address);
  if (m->watch) tell(m->watch, number_of(t), clocks_at(m->watch, barrier, 1));
  barrier_change(m, barrier, arrivals, bytes);
}

static int barrier_passed(Thread *t, uint32_t address, uint32_t parity) {
  Watch *v = t->warp->cta->machine->watch;
  uint64_t *barrier = barrier_at(t, address);
  int passed = (*barrier & 1) != parity;
  if (passed && v) learn(v, number_of(t), *clocks_at(v, barrier, 2));
  if (!passed) t->warp->yields = 1;
  return passed;
}

// -- barriers of warps

static int pass(Warp *w, Named *barrier, int threads, int arrives, int votes, int waits) {
  Watch *v = w->cta->machine->watch;
  if (!w->arrived && arrives) {
    if (v) EACH(~0u) tell(v, number_of(t), &barrier->told);
    w->phase = barrier->phase;
    barrier->arrived += 32;
    barrier->votes += votes;
    if (barrier->arrived > threads) fail(w->cta->machine, "more arrive at a named barrier than %d", threads);
    if (barrier->arrived == threads) {
      barrier->sum = barrier->votes, barrier->arrived = barrier->votes = 0, barrier->phase++;
      free(barrier->known), barrier->known = barrier->told, barrier->told = 0;
    }
    w->arrived = 1;
  }
  if (waits && barrier->phase == w->phase) return 0;
  if (waits && v) EACH(~0u) learn(v, number_of(t), barrier->known);
  w->arrived = 0;
  return 1;
}

static int named_barrier(Warp *w, uint32_t number, int threads, int votes, int waits) {
  if (number >= NAMED_BARRIERS) fail(w->cta->machine, "named barrier %d", (int)number);
  return pass(w, &w->cta->named[number], threads, 1, votes, waits);
}

static Named *cluster_of(Warp *w) { return &w->cta->machine->clusters[w->cta->number / w->cta->machine->cluster]; }

static int cluster_arrive(Warp *w) { return pass(w, cluster_of(w), THREADS * w->cta->machine->cluster, 1, 0, 0); }

static int cluster_wait(Warp *w) { return pass(w, cluster_of(w), 0, 0, 0, 1); }

static int shuffle_bfly(int lane, int b, int c) {
  int segments = c >> 8 & 31, most = (lane & segments) | (c & 31 & ~segments), from = lane ^ b;
  return from <= most ? from : -1;
}

static int shuffle_idx(int lane, int b, int c) {
  int segments = c >> 8 & 31, most = (lane & segments) | (c & 31 & ~segments), from = (lane & segments) | (b & 31 & ~segments);
  return from <= most ? from : -1;
}

// -- the copy engine

static void copy_tile(Thread *t, uint64_t tensor, int x, int y, uint32_t to, uint32_t barrier, uint32_t mask) {
  Machine *m = t->warp->cta->machine;
  Cta *cta = t->warp->cta;
  if (m->many_copies == MOST_COPIES) fail(m, "more than %d copies at once", MOST_COPIES);
  Copy copy = {(const Tensor *)(uintptr_t)tensor, x, y, cta->rank, cta->number - cta->rank, to, barrier, mask ? mask : 1u << cta->rank};
  copy.thread = number_of(t), copy.place = t->place;
  if (m->watch) {
    tell(m->watch, copy.thread, &copy.known);
  }
  m->copies[m->many_copies++] = copy;
}

static void arrive_copy(Machine *m, int number) {
  Copy copy = m->copies[number];
  m->copies[number] = m->copies[--m->many_copies];
  const Tensor *tensor = copy.tensor;
  int bytes = tensor->box_rows * tensor->box_columns * 2;
  if (copy.to % 1024) fail(m, "a copy to %#x, which is no multiple of 1024", copy.to);
  for (int rank = 0; rank < m->cluster; rank++) {
    if (!(copy.mask >> rank & 1)) continue;
    Cta *cta = &m->all[copy.first_cta + rank];
    uint32_t to = copy.to & 0xFFFFFF;
    if (!shared_of(cta, to, 1) || !shared_of(cta, to + bytes - 1, 1)) fail(m, "a copy to shared memory at %#x", copy.to);
    uint64_t *barrier = (uint64_t *)(cta->shared + ((copy.barrier & 0xFFFFFF) - SHARED_BASE));
    if (m->watch) {
      uint64_t at = (uint64_t)(uintptr_t)shared_of(cta, to, 1);
      const Epoch *before = accessed(m->watch, copy.known, copy.thread, copy.place, at, bytes, STORES);
      if (before) fail_of_race(m, before, copy.thread, copy.place, STORES, "shared memory", to);
      join(m->watch, room(m->watch, clocks_at(m->watch, barrier, 1)), copy.known);
    }
    for (int row = 0; row < tensor->box_rows; row++)
      for (int column = 0; column < tensor->box_columns; column++) {
        int x = copy.x + column, y = copy.y + row;
        uint16_t value = 0;
        if (x >= 0 && x < tensor->columns && y >= 0 && y < tensor->rows)
          memcpy(&value, (char *)(uintptr_t)tensor->address + (uint64_t)y * tensor->rows_apart + 2 * x, 2);
        uint32_t place = to + (row * tensor->box_columns + column) * 2;
        place ^= (place >> 7 & 7) << 4;
        memcpy(cta->shared + (place - SHARED_BASE), &value, 2);
      }
    barrier_change(m, barrier, 0, -bytes);
  }
  free(copy.known);
}

// -- numbers

static inline float as_float(uint32_t bits) {
  float x;
  memcpy(&x, &bits, 4);
  return x;
}

static inline uint32_t as_bits(float x) {
  uint32_t bits;
  memcpy(&bits, &x, 4);
  return bits;
}

static inline float canonical(float x) { return x != x ? as_float(0x7FFFFFFF) : x; } // the one NaN that arithmetic gives

static inline float flushed(float x) { return fabsf(x) < 0x1p-126f ? copysignf(0.0f, x) : x; }

static float approximate(Thread *t, double exact, float of) { // off by as much for the same operand
  float x = (float)exact;
  int sloppy = t->warp->cta->machine->sloppy;
  if (!sloppy || !isfinite(x) || fabsf(x) < 0x1p-120f) return flushed(x);
  uint32_t hash = (as_bits(of) ^ as_bits(of) >> 15) * 0x85EBCA6Bu;
  return as_float(as_bits(x) + (int)((hash >> 8) % (2 * sloppy + 1)) - sloppy);
}

static float ex2_approx(Thread *t, float x) { return approximate(t, exp2((double)flushed(x)), x); }

static float lg2_approx(Thread *t, float x) { return x == 1.0f ? 0.0f : approximate(t, log2((double)flushed(x)), x); }

static float rcp_approx(Thread *t, float x) { return approximate(t, 1.0 / (double)flushed(x), x); }

static inline float minimum(float a, float b, int nan) {
  if (a != a || b != b) return nan || (a != a && b != b) ? as_float(0x7FFFFFFF) : a != a ? b : a;
  return a < b || (a == b && signbit(a)) ? a : b;
}

static inline float maximum(float a, float b, int nan) {
  if (a != a || b != b) return nan || (a != a && b != b) ? as_float(0x7FFFFFFF) : a != a ? b : a;
  return a > b || (a == b && !signbit(a)) ? a : b;
}

static inline int64_t divided(int64_t a, int64_t b) { return b == 0 ? -1 : b == -1 ? -a : a / b; }

static inline int64_t remainder_of(int64_t a, int64_t b) { return b == 0 ? a : b == -1 ? 0 : a % b; }

static inline float float_towards_zero(uint32_t x) {
  float rounded = (float)x;
  return (double)rounded > (double)x ? nextafterf(rounded, 0.0f) : rounded;
}

static inline uint32_t bf16_towards_zero(float x) { return x != x ? 0x7FFF : as_bits(x) >> 16; }

static inline uint32_t bf16_nearest(double x) { // of a sum that a double holds exactly
  if (x != x) return 0x7FFF;
  float below = (float)x; // towards zero, so that the second rounding is the only one
  if (isfinite(x) && fabs((double)below) > fabs(x)) below = nextafterf(below, 0.0f);
  uint32_t bits = as_bits(below), upper = bits >> 16, rest = bits & 0xFFFF;
  int more = (double)below != x;
  if (isinf(below) || rest < 0x8000 || (rest == 0x8000 && !more && !(upper & 1))) return upper;
  return upper + 1;
}

static inline uint32_t fma_bf16x2(uint32_t a, uint32_t b, uint32_t c) {
  uint32_t both = 0;
  for (int half = 0; half < 32; half += 16) {
    double x = as_float((a >> half & 0xFFFF) << 16), y = as_float((b >> half & 0xFFFF) << 16);
    both |= (bf16_nearest(x * y + as_float((c >> half & 0xFFFF) << 16)) & 0xFFFF) << half;
  }
  return both;
}

static inline uint32_t permuted(uint32_t a, uint32_t b, uint32_t how) {
  uint64_t bytes = (uint64_t)b << 32 | a;
  uint32_t result = 0;
  for (int n = 0; n < 4; n++) {
    uint32_t select = how >> (4 * n) & 15, byte = bytes >> (8 * (select & 7)) & 0xFF;
    result |= (select & 8 ? (byte & 0x80 ? 0xFFu : 0) : byte) << (8 * n);
  }
  return result;
}

static inline float half_to_float(uint16_t bits) {
  uint32_t exponent = bits >> 10 & 31, fraction = bits & 0x3FF, sign = (uint32_t)(bits >> 15) << 31;
  if (exponent == 31) return as_float(sign | 0x7F800000 | fraction << 13);
  if (exponent) return as_float(sign | (exponent + 112) << 23 | fraction << 13);
  float x = (float)fraction * 0x1p-24f;
  return sign ? -x : x;
}

// -- tensor cores. Each warp has 16 of the 64 rows, whose operands lie in shared memory, swizzled.

static void read_operand(Warp *w, uint64_t descriptor, int first, int rows, int is_bf16, float *to) { // (16, rows)
  Machine *m = w->cta->machine;
  uint32_t start = (descriptor & 0x3FFF) << 4, apart = (descriptor >> 32 & 0x3FFF) << 4;
  int swizzle = descriptor >> 62; // 1: by 128 bytes, 2: by 64, 3: by 32
  if (!swizzle || (descriptor >> 49 & 7)) fail(m, "a descriptor %#llx", (unsigned long long)descriptor);
  for (int row = 0; row < rows; row++)
    for (int k = 0; k < 16; k += 8) { // 16 bytes lie together
      uint32_t place = start + (first + row) / 8 * apart + (first + row) % 8 * (256 >> swizzle) + 2 * k;
      place ^= (place >> 7 & (8 >> swizzle) * 2 - 1 & 7) << 4;
      uint16_t *at = shared_of(w->cta, place, 16);
      if (!at) fail(m, "an operand in shared memory at %#x", place);
      watched(&w->threads[0], at, 16, LOADS, 0, "shared memory", place);
      for (int n = 0; n < 8; n++) to[(k + n) * rows + row] = is_bf16 ? as_float((uint32_t)at[n] << 16) : half_to_float(at[n]);
    }
}

__attribute__((optimize("O3"))) static void add_products(const float *a, const float *b, int columns, double *sums) {
  for (int k = 0; k < 16; k++) // of one row
    for (int column = 0; column < columns; column++) sums[column] += (double)a[16 * k] * (double)b[k * columns + column];
}

static void compute(Warp *w, Product *product) {
  float a[16 * 16], b[16 * 256];
  double sums[16][256] = {{0}};
  read_operand(w, product->a, w->number % 4 * 16, 16, product->is_bf16, a);
  read_operand(w, product->b, 0, product->columns, product->is_bf16, b);
  for (int row = 0; row < 16; row++) add_products(a + row, b, product->columns, sums[row]);
  for (int lane = 0; lane < 32; lane++)
    for (int n = 0; n < product->columns / 2; n++) {
      uint32_t *sum = &w->threads[lane].r[product->accumulator[n]];
      double before = product->accumulate ? (double)as_float(*sum) : 0.0;
      *sum = as_bits(canonical((float)(before + sums[lane / 4 + (n & 2 ? 8 : 0)][n / 4 * 8 + lane % 4 * 2 + (n & 1)])));
    }
}

static void compute_first(Warp *w, int many) {
  for (int n = 0; n < many; n++) compute(w, &w->products[n]);
  memmove(w->products, w->products + many, (w->many_products - many) * sizeof(Product));
  w->many_products -= many;
}

static void multiply(Warp *w, const uint16_t *accumulator, int columns, uint64_t a, uint64_t b, int accumulate, int is_bf16) {
  if (w->many_products == MOST_PRODUCTS) fail(w->cta->machine, "more than %d products at once", MOST_PRODUCTS);
  Product product = {accumulator, columns, accumulate, is_bf16, w->group, a, b};
  w->products[w->many_products++] = product;
}

static void commit_products(Warp *w) {
  w->group++;
  if ((int)draw(w->cta->machine, 8) >= w->cta->machine->late) compute_first(w, w->many_products);
}

static void await_products(Warp *w, int groups) {
  int many = 0;
  while (many < w->many_products && w->products[many].group < w->group - groups) many++;
  compute_first(w, many);
  meet(w, ~0u); // each of them has waited
}

// -- who runs next

static int run_group(Warp *w, int place) { // those threads of a warp that are at a place
  Machine *m = w->cta->machine;
  uint32_t group = 0;
  for (int lane = 0; lane < 32; lane++) group |= (uint32_t)(w->threads[lane].place == place) << lane;
  if (STRETCHES[place].meet) {
    if (!STRETCHES[place].meet(w, group)) return 0;
    EACH(group) t->place++;
  } else
    EACH(group) t->place = STRETCHES[place].go(t);
  m->executed[w->cta->number * (THREADS / 32) + w->number] += SIZES[place] * __builtin_popcount(group);
  return 1;
}

static void run_warp(Warp *w) { // until it yields, waits, or has run for long enough
  Machine *m = w->cta->machine;
  w->yields = 0;
  for (int turn = 1 + draw(m, 64); turn > 0 && !w->yields; turn--) {
    uint32_t alive = living(w);
    if (!alive) return;
    // the threads that are furthest behind, mostly; then each of the others
    int first = draw(m, 8) ? -1 : (int)draw(m, 32), done = 0;
    if (first >= 0 && (alive >> first & 1)) done = run_group(w, w->threads[first].place);
    for (int last = -1; !done;) {
      int place = MANY_STRETCHES;
      EACH(alive) if (t->place > last && t->place < place) place = t->place;
      if (place == MANY_STRETCHES) return;
      done = run_group(w, place);
      last = place;
    }
  }
}

static void release(Machine *m) {
  for (int c = 0; c < m->ctas; c++) {
    free(m->all[c].shared), free(m->all[c].warps);
    for (int n = 0; n < NAMED_BARRIERS; n++) free(m->all[c].named[n].told), free(m->all[c].named[n].known);
  }
  for (int c = 0; c < m->ctas / m->cluster; c++) free(m->clusters[c].told), free(m->clusters[c].known);
  for (int n = 0; n < m->many_copies; n++) free(m->copies[n].known);
  forget(m->watch);
  free(m->all), free(m->clusters), free(m->queue), free(m);
}

// A launch that waits for its first turn.
Machine *start(const char *parameters, int ctas, int cluster, const Range *ranges, int many_ranges, uint64_t seed, int late,
               int sloppy, int watch, uint64_t *executed) {
  const int warps = THREADS / 32;
  Machine *m = calloc(1, sizeof(Machine));
  memcpy(m->parameters, parameters, PARAMETER_BYTES);
  m->ctas = ctas, m->cluster = cluster, m->ranges = ranges, m->many_ranges = many_ranges, m->late = late, m->sloppy = sloppy, m->executed = executed;
  m->random = seed * 0x9E3779B97F4A7C15ull + 0x1234567;
  m->all = calloc(ctas, sizeof(Cta));
  m->clusters = calloc(ctas / cluster, sizeof(Named));
  m->watch = watch ? watch_of(ctas * THREADS) : 0;
  m->queue = malloc(ctas * warps * sizeof(Warp *));
  for (int c = 0; c < ctas; c++) {
    Cta *cta = &m->all[c];
    cta->machine = m, cta->number = c, cta->rank = c % cluster;
    cta->shared = aligned_alloc(1024, SHARED_BYTES);
    memset(cta->shared, 0xA5, SHARED_BYTES); // nobody has been here
    cta->warps = calloc(warps, sizeof(Warp));
    for (int n = 0; n < warps; n++) {
      Warp *w = m->queue[m->living++] = &cta->warps[n];
      w->cta = cta, w->number = n;
      for (int lane = 0; lane < 32; lane++) {
        Thread *t = &w->threads[lane];
        memset(t, 0xA5, sizeof(Thread));
        t->place = 0, t->number = 32 * n + lane, t->warp = w;
      }
    }
  }
  return m;
}

// Some more turns: RUNNING or DONE; or FAILED, and why. What has not gone on is gone.
int advance(Machine *m, uint64_t rounds, char *error, int error_bytes) {
  m->error = error, m->error_bytes = error_bytes;
  if (setjmp(m->failed)) {
    release(m);
    return FAILED;
  }
  for (; m->living && rounds; rounds--, m->rounds++) {
    if (m->many_copies && !draw(m, 4)) arrive_copy(m, draw(m, m->many_copies));
    int chosen = draw(m, m->living);
    run_warp(m->queue[chosen]);
    if (!living(m->queue[chosen])) m->queue[chosen] = m->queue[--m->living];
  }
  if (m->living) return RUNNING;
  if (m->many_copies) fail(m, "%d copies are on their way when all is done", m->many_copies);
  release(m);
  return DONE;
}

// Where everybody stands, of a launch that goes on for too long; it is over.
void give_up(Machine *m, char *error, int error_bytes) {
  int used = snprintf(error, error_bytes, "no end after %llu rounds; warps:", (unsigned long long)m->rounds);
  for (int n = 0; n < m->living && used < error_bytes; n++) {
    Warp *w = m->queue[n];
    int place = w->threads[__builtin_ctz(living(w))].place;
    used += snprintf(error + used, error_bytes - used, " %d.%d at stretch %d", w->cta->number, w->number, place);
  }
  release(m);
}

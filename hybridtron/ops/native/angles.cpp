// Angles as running sums since the start of a row or a document:
//
//     theta_t = theta_{t-1} + step_t rate_t   modulo a full turn, by head and angle
//     with G_t the sum of dtheta from t to the end of its document,
//     dstep_t = sum over angles of G_t rate_t,   drate_t = sum over heads of G_t step_t
//
// Sums are float64, since a row may be long. A unit is a full row, since few numbers are read and written.
#include "numbers.h"
#include "threads.h"
#include <cmath>

constexpr double FULL_TURN = 6.283185307179586;

template <class S> struct Angles {
  int64_t rows, length, heads, angles;
  Tokens steps, rates, y, grad_y, grad_steps, grad_rates;
  const bool *starts;  // (rows, length), or null

  int64_t turned() const { return heads * angles; }
  bool begins(int64_t r, int64_t t) const { return starts && starts[r * length + t]; }
};

template <class S> static void forward_row(void *task, int r, char *scratch) {
  const Angles<S> &of = *(const Angles<S> *)task;
  double *theta = (double *)scratch, *step = theta + of.turned(), *rate = step + of.heads;
  memset(theta, 0, of.turned() * sizeof(double));
  for (int64_t t = 0; t < of.length; t++) {
    read(step, of.steps, r, t, 0, of.heads), read(rate, of.rates, r, t, 0, of.angles);
    if (of.begins(r, t)) memset(theta, 0, of.turned() * sizeof(double));
    for (int64_t h = 0; h < of.heads; h++) {
      double *angle = theta + h * of.angles;
#pragma GCC ivdep
      for (int64_t i = 0; i < of.angles; i++) {
        const double next = angle[i] + step[h] * rate[i];
        angle[i] = next - FULL_TURN * std::floor(next / FULL_TURN);
      }
    }
    write(theta, of.y, r, t, 0, of.turned());
  }
}

template <class S> static void backward_row(void *task, int r, char *scratch) {
  const Angles<S> &of = *(const Angles<S> *)task;
  double *sum = (double *)scratch, *step = sum + of.turned(), *rate = step + of.heads;
  double *of_step = rate + of.angles, *of_rate = of_step + of.heads, *grad = of_rate + of.angles;
  memset(sum, 0, of.turned() * sizeof(double));
  for (int64_t t = of.length; t-- > 0;) {
    read(step, of.steps, r, t, 0, of.heads), read(rate, of.rates, r, t, 0, of.angles);
    read(grad, of.grad_y, r, t, 0, of.turned());
    memset(of_rate, 0, of.angles * sizeof(double));
    for (int64_t h = 0; h < of.heads; h++) {
      double *reached = sum + h * of.angles, found = 0;
      const double *from = grad + h * of.angles;
#pragma GCC ivdep
      for (int64_t i = 0; i < of.angles; i++) {
        reached[i] += from[i];
        of_rate[i] += reached[i] * step[h];
      }
      for (int64_t i = 0; i < of.angles; i++) found += reached[i] * rate[i];
      of_step[h] = found;
    }
    write(of_step, of.grad_steps, r, t, 0, of.heads), write(of_rate, of.grad_rates, r, t, 0, of.angles);
    if (of.begins(r, t)) memset(sum, 0, of.turned() * sizeof(double));
  }
}

template <class S> static int over_rows(void (*function)(void *, int, char *), Angles<S> *of, int threads) {
  const size_t scratch = 2 * (of->turned() + of->heads + of->angles) * sizeof(double);
  return !share(function, of, of->rows, threads, scratch);
}

extern "C" int angles_forward_float(Angles<float> *of, int threads) { return over_rows(forward_row<float>, of, threads); }
extern "C" int angles_forward_double(Angles<double> *of, int threads) {
  return over_rows(forward_row<double>, of, threads);
}
extern "C" int angles_backward_float(Angles<float> *of, int threads) {
  return over_rows(backward_row<float>, of, threads);
}
extern "C" int angles_backward_double(Angles<double> *of, int threads) {
  return over_rows(backward_row<double>, of, threads);
}

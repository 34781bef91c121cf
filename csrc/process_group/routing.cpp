// How a call's route is chosen, and what is measured for it.
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <cmath>

#include "process_group/ProcessGroupZipCCL.h"

namespace zipccl {
namespace {

using Clock = std::chrono::steady_clock;
using c10d::OpType;

// After so many calls of a kind, one measurement tells whether the link is what it was. It takes half a millisecond and
// a call, so that short calls count less.
constexpr double kReviewCalls = 64;
constexpr double kShortSeconds = 5e-3;
constexpr double kShortCall = 0.25;
// Of CUDA calls, for which the host does not wait else, and of those whose sizes are not known to all and may be small.
constexpr double kRareCall = 1.0 / 16;
// The size that the choice for such calls is made for.
constexpr uint64_t kSplitsBytes = 1 << 20;

// Of calls that take so long: how many one behind the other are timed at once, and how often that is repeated. Short
// ones vary more.
int in_a_row(double seconds) { return std::clamp(static_cast<int>(std::ceil(2e-3 / seconds)), 1, 10); }
int repetitions(double seconds) {
  return seconds > 0.2 ? 1 : std::clamp(static_cast<int>(0.1 / (seconds * in_a_row(seconds))), 2, 15);
}

double quantile(std::vector<double> values, double which) {
  std::sort(values.begin(), values.end());
  return values[static_cast<size_t>(std::lround(which * static_cast<double>(values.size() - 1)))];
}

}  // namespace

Route ProcessGroupZipCCL::route_of(Collective collective, const at::Tensor& tensor, uint64_t part_bytes, bool exchange,
                                   bool native) {
  Sizes sizes;
  sizes.add(tensor, part_bytes);
  return route_of(collective, sizes, exchange, native);
}

Route ProcessGroupZipCCL::route_of(Collective collective, const Sizes& sizes, bool exchange, bool native) {
  const Choice uncoded{native ? Route::kNative : Route::kRaw};
  if (!sizes.sample.defined()) return uncoded.route;
  if (!exchange) {
    return decided(collective, sizes, uncoded, "not what can be coded: the dtype, the operation or the stream");
  }
  if (options_->mode == Route::kNative) return decided(collective, sizes, uncoded, "mode='native'");
  if (sizes.largest < options_->exchange.min_bytes) {
    return decided(collective, sizes, uncoded, "smaller than min_bytes");
  }
  if (!options_->mode) {
    return switched(collective, sizes, native, /*rare_review=*/sizes.sample.is_cuda());
  }
  Choice choice{*options_->mode};
  if (choice.route == Route::kHierarchical && (!hosts_.hierarchical() || collective == Collective::kAllToAll)) {
    choice.route = Route::kZip;
    return decided(collective, sizes, choice, "mode='hierarchical', but there is no hierarchy for this call");
  }
  return decided(collective, sizes, choice, "the mode");
}

Route ProcessGroupZipCCL::route_of_splits(const at::Tensor& tensor, bool native) {
  constexpr auto kAllToAll = Collective::kAllToAll;
  const bool exchange = exchangeable(tensor);
  if (!exchange || options_->mode) {  // whatever the size: no rank knows all
    return route_of(kAllToAll, tensor, options_->exchange.min_bytes, exchange, native);
  }
  Sizes sizes;
  sizes.add(tensor, kSplitsBytes);
  return switched(kAllToAll, sizes, /*native=*/false, /*rare_review=*/true);
}

Route ProcessGroupZipCCL::switched(Collective collective, const Sizes& sizes, bool native, bool rare_review) {
  if (size_ == 1) {
    return decided(collective, sizes, {native ? Route::kNative : Route::kRaw}, "the rank is alone in its group");
  }
  const CallKind kind{collective, dtype_of(sizes.sample), sizes.sample.is_cuda()};
  if (coalescing_) {
    // The wrapped backend may be in the middle of a group of calls.
    if (switcher_.next(kind, sizes.total)) {
      return decided(collective, sizes, {Route::kZip}, "not measured: calls are being coalesced");
    }
  } else {
    learn(kind, sizes.total, sizes.sample);
    const Choice choice = switcher_.choose(kind, sizes.total, native);
    const bool is_short = choice.predicted[static_cast<int>(choice.route)] < kShortSeconds;
    double& calls = since_review_[kind];
    calls += rare_review ? kRareCall : is_short ? kShortCall : 1;
    if (calls >= kReviewCalls) {
      calls = 0;
      review(kind, sizes.total, sizes.sample, choice.route);
    }
  }
  const Choice choice = switcher_.choose(kind, sizes.total, native);
  return decided(collective, sizes, choice,
                 choice.route == Route::kNative ? "no other way is measurably faster" : "the fastest as measured");
}

Route ProcessGroupZipCCL::decided(Collective collective, const Sizes& sizes, const Choice& choice, const char* reason) {
  const DType dtype = dtype_of(sizes.sample);
  const bool cuda = sizes.sample.is_cuda();
  // One entry for what is within a factor of four in size, where sizes matter.
  const auto magnitude = [](uint64_t bytes) {
    int result = 0;
    for (; bytes > 1024; bytes /= 4) result++;
    return result;
  };
  const bool by_size = std::any_of(choice.predicted.begin(), choice.predicted.end(), [](double s) { return s >= 0; });
  std::lock_guard<std::mutex> lock(stats_mutex_);
  auto& decisions = stats_[name(collective)].decisions;
  auto found = std::find_if(decisions.begin(), decisions.end(), [&](const Decision& one) {
    return one.dtype == dtype && one.cuda == cuda && one.route == choice.route && one.reason == reason &&
           (!by_size || magnitude(one.part_bytes) == magnitude(sizes.total));
  });
  if (found == decisions.end()) {
    decisions.push_back({dtype, cuda, 0, choice.route, reason, 0, {}});
    found = std::prev(decisions.end());
  }
  found->calls++;
  found->part_bytes = sizes.total;
  found->predicted = choice.predicted;
  return choice.route;
}

// ---- Measuring

void ProcessGroupZipCCL::learn(const CallKind& kind, uint64_t bytes, const at::Tensor& sample) {
  if (!switcher_.next(kind, bytes)) return;
  agree_to_measure(kind, bytes);
  std::vector<Route> routes = {Route::kNative, Route::kRaw, Route::kZip};
  if (hosts_.hierarchical() && kind.collective != Collective::kAllToAll) routes.push_back(Route::kHierarchical);
  while (const auto next = switcher_.next(kind, bytes)) {
    const Measured measured = measure(kind, *next, sample, routes);
    std::lock_guard<std::mutex> lock(stats_mutex_);
    switcher_.add(kind, *next, measured);
  }
}

void ProcessGroupZipCCL::review(const CallKind& kind, uint64_t bytes, const at::Tensor& sample, Route route) {
  const uint64_t probe = switcher_.probe(kind, bytes);
  const double expected = switcher_.predict(kind, probe)[static_cast<int>(route)];
  agree_to_measure(kind, bytes);
  for (int i = 0; i < 3; i++) {  // again, as anything may come between
    const double now = measure(kind, probe, sample, {route}, /*once=*/true).seconds[static_cast<int>(route)];
    if (!Switcher::changed(now, expected)) return;
  }
  {
    std::lock_guard<std::mutex> lock(stats_mutex_);
    switcher_.forget();
  }
  learn(kind, bytes, sample);
}

// All ranks must be about to measure the same, as the wrapped backend may not bear other calls.
void ProcessGroupZipCCL::agree_to_measure(const CallKind& kind, uint64_t bytes) {
  Job job = [kind, elements = bytes / element_bytes(kind.dtype)](Exchange& exchange, uint64_t sequence) {
    Parts parts;
    parts.outgoing.assign(exchange.size(), Part{nullptr, elements});
    parts.incoming.assign(exchange.size(), elements);
    exchange.agree({kind.collective, sequence, kind.dtype}, parts);
  };
  waitForPendingWorks();  // what they count is no measurement's
  measuring_ = true;
  auto work = submit_exchange(kind.collective, OpType::UNKNOWN, {}, {}, c10d::kUnsetTimeout, false, {std::move(job)});
  try {
    work->wait();
  } catch (...) {
    measuring_ = false;
    throw;
  }
  measuring_ = false;
}

Measured ProcessGroupZipCCL::measure(const CallKind& kind, uint64_t bytes, const at::Tensor& sample,
                                     const std::vector<Route>& routes, bool once) {
  const int64_t part = static_cast<int64_t>(bytes / element_bytes(kind.dtype));
  const int64_t parts_in = kind.collective == Collective::kAllGather ? 1 : size_;
  const int64_t parts_out = kind.collective == Collective::kReduceScatter ? 1 : size_;
  // The call's own data, again and again; where this rank has none, what tensors are like.
  const at::Tensor values = dense(sample).view({-1}).detach();
  at::Tensor input = at::empty({part * parts_in}, values.options());
  at::Tensor output = at::empty({part * parts_out}, values.options());
  if (values.numel() == 0) input.normal_(0.0, 0.02);
  for (int64_t at = 0; values.numel() > 0 && at < input.numel(); at += values.numel()) {
    const int64_t count = std::min(values.numel(), input.numel() - at);
    input.narrow(0, at, count).copy_(values.narrow(0, 0, count));
  }
  measuring_ = true;
  struct Measuring {
    std::atomic<bool>& flag;
    ~Measuring() { flag = false; }
  } measuring{measuring_};

  const auto agreed = [this](std::vector<double> figures) {
    Tensors tensors{at::from_blob(figures.data(), {static_cast<int64_t>(figures.size())}, at::kDouble)};
    c10d::AllreduceOptions maximum;
    maximum.reduceOp = c10d::ReduceOp::MAX;
    plain_->allreduce(tensors, maximum)->wait();
    return figures;
  };
  const auto synchronise = [&] {
    if (!kind.cuda) return;
    const c10::impl::VirtualGuardImpl device(c10::DeviceType::CUDA);
    device.synchronizeStream(device.getStream(input.device()));
  };
  const auto timed = [&](Route route, int calls) {
    if (kind.collective == Collective::kAllReduce) output.copy_(input);  // sums must not grow
    synchronise();
    plain_->barrier(c10d::BarrierOptions())->wait();
    const auto start = Clock::now();
    for (int i = 0; i < calls; i++) measured_call(kind.collective, route, output, input)->wait();
    synchronise();
    return std::chrono::duration<double>(Clock::now() - start).count() / calls;
  };

  Measured measured;
  std::vector<double> times;
  const auto round = [&](int calls) {  // in which the routes take turns
    for (Route route : routes) {
      {
        std::lock_guard<std::mutex> lock(stats_mutex_);
        measured_ = {};
      }
      times.push_back(timed(route, calls));
      if (route != Route::kZip) continue;
      waitForPendingWorks();
      std::lock_guard<std::mutex> lock(stats_mutex_);
      measured.encode_seconds = measured_.encode_seconds / calls;
      measured.decode_seconds = measured_.decode_seconds / calls;
      measured.ratio = static_cast<double>(measured_.wire_bytes) / static_cast<double>(measured_.raw_bytes);
    }
  };
  round(1);
  times = agreed(std::move(times));
  const double longest = *std::max_element(times.begin(), times.end());
  int rounds = once ? 0 : repetitions(longest);
  if (rounds > 0) {
    times.clear();  // first calls may be slow
    for (int i = 0; i < rounds; i++) round(in_a_row(longest));
  }
  rounds = std::max(rounds, 1);
  times.insert(times.end(), {measured.ratio, measured.encode_seconds, measured.decode_seconds});
  times = agreed(std::move(times));
  for (size_t r = 0; r < routes.size(); r++) {
    std::vector<double> of_route;
    for (int i = 0; i < rounds; i++) of_route.push_back(times[i * routes.size() + r]);
    const int route = static_cast<int>(routes[r]);
    const double middle = quantile(of_route, 0.5), spread = quantile(of_route, 0.75) - quantile(of_route, 0.25);
    const double doubt = 1.5 * spread / std::sqrt(rounds);
    measured.seconds[route] = middle;
    measured.low[route] = std::max(middle - doubt, 0.0);
    measured.high[route] = middle + doubt;
  }
  const size_t end = rounds * routes.size();
  measured.ratio = times[end];
  measured.encode_seconds = times[end + 1];
  measured.decode_seconds = times[end + 2];
  return measured;
}

c10::intrusive_ptr<c10d::Work> ProcessGroupZipCCL::measured_call(Collective collective, Route route, at::Tensor& output,
                                                                 at::Tensor& input) {
  if (route == Route::kNative) {
    const auto backend = input.is_cuda() ? cuda_plain() : plain_;
    switch (collective) {
      case Collective::kAllGather:
        return backend->_allgather_base(output, input);
      case Collective::kReduceScatter:
        return backend->_reduce_scatter_base(output, input);
      case Collective::kAllToAll: {
        std::vector<int64_t> equal, also_equal;
        return backend->alltoall_base(output, input, equal, also_equal);
      }
      case Collective::kAllReduce: {
        Tensors tensors{output};
        return backend->allreduce(tensors);
      }
    }
  }
  if (collective == Collective::kAllToAll) {
    c10d::AllToAllOptions options;
    options.asyncOp = false;
    return all_to_all(chunks(output, size_), chunks(input, size_), {output}, {input}, OpType::UNKNOWN, route, options);
  }
  Job job;
  switch (collective) {
    case Collective::kAllGather:
      job = all_gather_job(route, chunks(output, size_), input);
      break;
    case Collective::kReduceScatter:
      job = reduce_scatter_job(route, output, chunks(input, size_), c10d::ReduceOp::SUM);
      break;
    default:
      job = all_reduce_job(route, output, c10d::ReduceOp::SUM);
  }
  return submit_exchange(collective, OpType::UNKNOWN, {input}, {output}, c10d::kUnsetTimeout, false, {std::move(job)});
}

std::vector<ProfilePoint> ProcessGroupZipCCL::profile() {
  std::lock_guard<std::mutex> lock(stats_mutex_);
  std::vector<ProfilePoint> points;
  for (const auto& [kind, curve] : switcher_.curves()) {
    for (const auto& [bytes, measured] : curve) points.push_back({hosts_.describe(), kind, bytes, measured});
  }
  return points;
}

}  // namespace zipccl

// Simulates the parts of a CUDA device that torch asks about: tensors and autograd of the device "cuda:0" then work as
// long as nothing is computed. Nothing is allocated or run, and a real device is not touched. The hooks are registered
// with the preferred priority and before torch is imported, so that a torch build with CUDA leaves them in place. Such a
// build registers its own device guard, so install_guard() replaces that one afterwards.
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

namespace {
using c10::Device;
using c10::DeviceIndex;
using c10::Stream;

const Device device(c10::DeviceType::CUDA, 0);
const Stream stream(Stream::DEFAULT, device);
char event_handle;

struct FakeGuard : public c10::impl::NoOpDeviceGuardImpl<c10::DeviceType::CUDA> {
  Device exchangeDevice(Device) const override { return device; }
  Device getDevice() const override { return device; }
  Stream getStream(Device) const noexcept override { return stream; }
  Stream getDefaultStream(Device) const override { return stream; }
  Stream getNewStream(Device, int) const override { return stream; }
  Stream getStreamFromGlobalPool(Device, bool) const override { return stream; }
  Stream exchangeStream(Stream) const noexcept override { return stream; }
  DeviceIndex deviceCount() const noexcept override { return 1; }
  void record(void** event, const Stream&, const DeviceIndex, const c10::EventFlag) const override {
    *event = &event_handle;
  }
  void block(void*, const Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void destroyEvent(void*, const DeviceIndex) const noexcept override {}
  void synchronizeEvent(void*) const override {}
  bool queryStream(const Stream&) const override { return true; }
  void synchronizeStream(const Stream&) const override {}
  void synchronizeDevice(const DeviceIndex) const override {}
};
FakeGuard guard;

struct FakeHooks : public at::CUDAHooksInterface {
  explicit FakeHooks(at::CUDAHooksArgs) {}
  void init() const override {}
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasCUDA() const override { return true; }
  DeviceIndex deviceCount() const override { return 1; }
  DeviceIndex getCurrentDevice() const override { return 0; }
  DeviceIndex current_device() const override { return 0; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
};

std::unique_ptr<at::CUDAHooksInterface> make(at::CUDAHooksArgs args) { return std::make_unique<FakeHooks>(args); }

struct BeforeTorch {
  BeforeTorch() { at::CUDAHooksRegistry()->Register("CUDAHooks", make, c10::REGISTRY_PREFERRED); }
} before_torch;
}  // namespace

extern "C" void install_guard() {
  c10::impl::device_guard_impl_registry[static_cast<int>(c10::DeviceType::CUDA)].store(&guard);
}

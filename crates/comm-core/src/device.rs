//! Where memory lives and which stream orders work on it. Opaque here; the `gpu` crate gives them meaning.

use std::fmt;
use std::marker::PhantomData;

use serde::{Deserialize, Serialize};

/// A kind of memory or processor.
#[non_exhaustive]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum DeviceKind {
    /// Host memory.
    Cpu,
    /// An NVIDIA GPU.
    Cuda,
    /// An AMD GPU.
    Hip,
}

/// The device a communicator works on.
///
/// For GPUs an ordinal of `None` means "local rank modulo the number of visible devices".
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Device {
    /// The kind of device.
    pub kind: DeviceKind,
    /// The ordinal among the visible devices of that kind.
    pub ordinal: Option<u32>,
}

impl Device {
    /// Host memory.
    pub const CPU: Self = Self { kind: DeviceKind::Cpu, ordinal: None };

    /// An NVIDIA GPU; `None` picks one by local rank.
    #[must_use]
    pub const fn cuda(ordinal: Option<u32>) -> Self {
        Self { kind: DeviceKind::Cuda, ordinal }
    }

    /// An AMD GPU; `None` picks one by local rank.
    #[must_use]
    pub const fn hip(ordinal: Option<u32>) -> Self {
        Self { kind: DeviceKind::Hip, ordinal }
    }
}

impl fmt::Display for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = match self.kind {
            DeviceKind::Cpu => "cpu",
            DeviceKind::Cuda => "cuda",
            DeviceKind::Hip => "hip",
        };
        match self.ordinal {
            Some(n) => write!(f, "{name}:{n}"),
            None => f.write_str(name),
        }
    }
}

/// A raw stream handle together with its device, borrowed from whoever owns the stream.
#[derive(Clone, Copy, Debug)]
pub struct StreamRef<'a> {
    handle: usize,
    device: Device,
    owner: PhantomData<&'a ()>,
}

impl StreamRef<'_> {
    /// Wraps a raw handle (`CUstream`, `hipStream_t`). Safe constructors live in the `gpu` crate.
    ///
    /// # Safety
    ///
    /// `handle` is a live stream of `device` for the whole lifetime `'a`.
    #[must_use]
    pub const unsafe fn from_raw(handle: usize, device: Device) -> Self {
        Self { handle, device, owner: PhantomData }
    }

    /// The raw handle.
    #[must_use]
    pub const fn handle(&self) -> usize {
        self.handle
    }

    /// The device that owns the stream.
    #[must_use]
    pub const fn device(&self) -> Device {
        self.device
    }
}

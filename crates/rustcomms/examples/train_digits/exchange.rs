//! Everything the training says to the other ranks, and how long that took.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use rustcomms::{Call, Communicator, Event, Form, Observer, ObserverGuard, Operation, Time, Work, op};

use crate::Failure;

/// Where a rank's time went, summed over all steps.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct Times {
    /// Forward and backward passes and updates.
    pub(crate) compute: Duration,
    /// Time in which at least one gradient was on its way.
    pub(crate) comm: Duration,
    /// The part of the training thread's time that communication took from it: calls and waiting.
    pub(crate) exposed: Duration,
}

impl Times {
    /// The share of communication that computation hid, 0 to 1.
    pub(crate) fn overlap(&self) -> f64 {
        if self.comm.is_zero() {
            return 0.0;
        }
        (1.0 - self.exposed.as_secs_f64() / self.comm.as_secs_f64()).clamp(0.0, 1.0)
    }
}

/// Exchanges gradients and numbers with the other ranks, or with nobody: then every call is a copy to
/// itself, and the training is the ordinary one.
pub(crate) struct Exchange<'c> {
    comm: Option<&'c Communicator>,
    overlap: bool,
    /// Gradients on their way, by layer.
    works: Vec<Option<Work<Vec<f64>>>>,
    flights: Arc<Flights>,
    _observing: Option<ObserverGuard>,
    times: Times,
    /// Of the step in progress.
    begun: Instant,
    exposed: Duration,
}

impl<'c> Exchange<'c> {
    pub(crate) fn new(comm: Option<&'c Communicator>, layers: usize, overlap: bool) -> Self {
        let flights = Arc::new(Flights::default());
        Self {
            comm,
            overlap,
            works: (0..layers).map(|_| None).collect(),
            _observing: comm.map(|c| c.observe(Arc::clone(&flights) as Arc<dyn Observer>)),
            flights,
            times: Times::default(),
            begun: Instant::now(),
            exposed: Duration::ZERO,
        }
    }

    pub(crate) fn rank(&self) -> usize {
        self.comm.map_or(0, Communicator::rank)
    }

    pub(crate) fn size(&self) -> usize {
        self.comm.map_or(1, Communicator::size)
    }

    /// Makes `values` those of rank 0.
    pub(crate) fn broadcast(&self, values: &mut [f32]) -> Result<(), Failure> {
        if let Some(comm) = self.comm {
            comm.broadcast(values, 0)?;
        }
        Ok(())
    }

    pub(crate) fn begin_step(&mut self) {
        self.begun = Instant::now();
        self.exposed = Duration::ZERO;
    }

    /// Sends a layer's gradient on its way to become the mean over all ranks. The vector goes along;
    /// [`finish`](Self::finish) brings it back.
    pub(crate) fn start(&mut self, layer: usize, grad: &mut Vec<f64>) -> Result<(), Failure> {
        let Some(comm) = self.comm else { return Ok(()) };
        let called = Instant::now();
        let work = comm.all_reduce_async(std::mem::take(grad), op::Avg)?;
        if self.overlap {
            self.works[layer] = Some(work);
        } else {
            *grad = work.wait()?;
        }
        self.exposed += called.elapsed();
        Ok(())
    }

    /// Waits for a layer's gradient.
    pub(crate) fn finish(&mut self, layer: usize, grad: &mut Vec<f64>) -> Result<(), Failure> {
        let Some(work) = self.works[layer].take() else { return Ok(()) };
        let called = Instant::now();
        *grad = work.wait()?;
        self.exposed += called.elapsed();
        Ok(())
    }

    pub(crate) fn end_step(&mut self) {
        self.times.compute += self.begun.elapsed().saturating_sub(self.exposed);
        self.times.exposed += self.exposed;
        self.times.comm += self.flights.take();
    }

    pub(crate) const fn times(&self) -> Times {
        self.times
    }

    /// Everybody's numbers, rank by rank.
    pub(crate) fn gather<const N: usize>(&self, mine: [f64; N]) -> Result<Vec<[f64; N]>, Failure> {
        let mut all = vec![0.0; N * self.size()];
        match self.comm {
            Some(comm) => comm.all_gather(&mine, &mut all)?,
            None => all.copy_from_slice(&mine),
        }
        Ok(all.chunks_exact(N).map(|c| std::array::from_fn(|i| c[i])).collect())
    }

    /// Compares a number that should be equal everywhere; names the ranks that differ from rank 0.
    pub(crate) fn differing(&self, mine: u64) -> Result<Vec<usize>, Failure> {
        let mut all = vec![mine; self.size()];
        if let Some(comm) = self.comm {
            comm.all_gather(&[mine], &mut all)?;
        }
        Ok((0..all.len()).filter(|r| all[*r] != all[0]).collect())
    }
}

/// Notes when each asynchronous all_reduce was in flight.
///
/// `Work::duration` knows how long an operation took, but when several overlap, only their places in
/// time tell how long any of them was in flight. An observer sees both, at the moment of completion.
#[derive(Debug, Default)]
struct Flights(Mutex<Vec<(Time, Time)>>);

impl Flights {
    /// Time in which at least one was in flight since the last call.
    fn take(&self) -> Duration {
        let mut list = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let total = union(&mut list);
        list.clear();
        total
    }
}

impl Observer for Flights {
    fn event(&self, event: &Event<'_>, at: Time) {
        if let Event::Completed { call: Call { desc, form: Form::Async, .. }, elapsed } = event
            && desc.operation == Operation::AllReduce
        {
            let called = Time(at.0.saturating_sub(elapsed.as_nanos() as u64));
            self.0.lock().unwrap_or_else(PoisonError::into_inner).push((called, at));
        }
    }
}

/// How much time the intervals (begin, end) cover together. Sorts them.
pub(crate) fn union(intervals: &mut [(Time, Time)]) -> Duration {
    intervals.sort_unstable();
    let mut covered = Duration::ZERO;
    let mut until = Time(0);
    for (begin, end) in intervals {
        covered += end.since((*begin).max(until));
        until = until.max(*end);
    }
    covered
}

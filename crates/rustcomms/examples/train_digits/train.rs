//! The training itself, over any communicator or over none.

use std::time::Instant;

use rustcomms::{Communicator, Fnv};

use crate::Failure;
use crate::data::{CLASSES, Dataset, PIXELS, shard};
use crate::exchange::{Exchange, Times};
use crate::net::{Net, Pass, Score, Sgd};
use crate::rng::Rng;

/// What to train, and how. Equal on all ranks.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Config {
    /// Widths of the layers between pixels and digits.
    pub(crate) hidden: Vec<usize>,
    pub(crate) epochs: usize,
    /// Rows of a global batch, shared among the ranks.
    pub(crate) batch: usize,
    /// Learning rate.
    pub(crate) rate: f32,
    pub(crate) momentum: f32,
    /// Seed of the initial weights and of the order of rows in each epoch.
    pub(crate) seed: u64,
    /// Whether gradients travel while earlier layers' backward passes run.
    pub(crate) overlap: bool,
}

impl Default for Config {
    fn default() -> Self {
        Self { hidden: vec![128, 64], epochs: 20, batch: 64, rate: 0.05, momentum: 0.9, seed: 0, overlap: true }
    }
}

impl Config {
    /// Widths of all layers, from the pixels to the digits.
    fn widths(&self) -> Vec<usize> {
        [&[PIXELS], self.hidden.as_slice(), &[CLASSES]].concat()
    }

    /// A hash of everything, by which ranks see that they were started alike.
    pub(crate) fn fingerprint(&self) -> u64 {
        Fnv::hash(format!("{self:?}").as_bytes())
    }
}

/// One epoch, over all ranks.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Epoch {
    /// From 1.
    pub(crate) number: usize,
    /// The training rows, each at the time when its batch came.
    pub(crate) train: Score,
    /// The held-out rows, at the epoch's end.
    pub(crate) test: Score,
    pub(crate) seconds: f64,
}

/// What a training ends with. The same on all ranks.
#[derive(Clone, Debug)]
pub(crate) struct Outcome {
    pub(crate) params: Vec<f32>,
    pub(crate) epochs: Vec<Epoch>,
    /// By rank.
    pub(crate) times: Vec<Times>,
}

impl Outcome {
    /// How the trained network does on the held-out rows.
    pub(crate) fn test(&self) -> Score {
        self.epochs.last().map(|e| e.test).unwrap_or_default()
    }
}

/// Follows a training.
pub(crate) trait Progress {
    /// A step is done.
    fn step(&mut self) {}
    /// An epoch is done.
    fn epoch(&mut self, epoch: &Epoch) {
        let _ = epoch;
    }
}

/// Follows nothing.
impl Progress for () {}

/// Trains over all ranks of `comm`. Collective: all ranks call it with the same data and configuration.
pub(crate) fn train(
    comm: &Communicator,
    data: &Dataset,
    cfg: &Config,
    progress: &mut dyn Progress,
) -> Result<Outcome, Failure> {
    run(Some(comm), data, cfg, progress)
}

/// The same training by one rank without any communication: same batches, same order.
pub(crate) fn train_alone(data: &Dataset, cfg: &Config, progress: &mut dyn Progress) -> Result<Outcome, Failure> {
    run(None, data, cfg, progress)
}

/// Global batches of an epoch; the last one may be smaller.
pub(crate) const fn steps_per_epoch(data: &Dataset, cfg: &Config) -> usize {
    data.train.len().div_ceil(cfg.batch)
}

fn run(
    comm: Option<&Communicator>,
    data: &Dataset,
    cfg: &Config,
    progress: &mut dyn Progress,
) -> Result<Outcome, Failure> {
    let mut net = Net::zeroed(&cfg.widths());
    let layers = net.layers.len();
    let mut peers = Exchange::new(comm, layers, cfg.overlap);
    let (rank, size) = (peers.rank(), peers.size());

    // Rank 0 draws the weights, the others get them.
    if rank == 0 {
        net.init(&mut Rng::new(cfg.seed, 0));
    }
    for layer in &mut net.layers {
        peers.broadcast(&mut layer.params)?;
    }

    let mut sgd = Sgd::new(&net, cfg.rate, cfg.momentum);
    let mut pass = Pass::new(&net);
    let mut grads: Vec<Vec<f64>> = net.layers.iter().map(|l| vec![0.0; l.params.len()]).collect();
    let mut order = data.train.clone();
    let mut epochs = Vec::with_capacity(cfg.epochs);

    for number in 1..=cfg.epochs {
        let begun = Instant::now();
        let mut score = Score::default();
        // The same order on all ranks, another one in each epoch.
        order.copy_from_slice(&data.train);
        Rng::new(cfg.seed, number as u64).shuffle(&mut order);

        for batch in order.chunks(cfg.batch) {
            peers.begin_step();
            // This rank's rows. Their gradients are divided by the rows of the global batch and multiplied
            // by the number of ranks, which the mean over ranks then divides by: so the result is the mean
            // over the global batch however unevenly its rows are shared, even if some ranks have none.
            pass.load(data, &batch[shard(batch.len(), rank, size)]);
            let scale = size as f64 / batch.len() as f64;

            net.forward(&mut pass);
            score.add(&net.score(&mut pass));
            for layer in (0..layers).rev() {
                net.gradient(&pass, layer, scale, &mut grads[layer]);
                peers.start(layer, &mut grads[layer])?;
                // While that gradient is on its way, on with the layer before.
                if layer > 0 {
                    net.propagate(&mut pass, layer);
                }
            }
            // First come those that left first: updates, too, run while other gradients are on their way.
            for layer in (0..layers).rev() {
                peers.finish(layer, &mut grads[layer])?;
                sgd.update(&mut net, layer, &grads[layer]);
            }
            peers.end_step();
            progress.step();
        }

        let mine = &data.test[shard(data.test.len(), rank, size)];
        pass.load(data, mine);
        net.forward(&mut pass);
        let test = net.score(&mut pass);

        let epoch = Epoch {
            number,
            train: gather_score(&peers, &score)?,
            test: gather_score(&peers, &test)?,
            seconds: begun.elapsed().as_secs_f64(),
        };
        progress.epoch(&epoch);
        if !epoch.train.loss.is_finite() {
            return Err(format!(
                "the training diverged in epoch {number} (loss {}); try a lower learning rate than {}",
                epoch.train.loss, cfg.rate
            )
            .into());
        }
        epochs.push(epoch);
    }

    let params = net.params();
    let differing = peers.differing(hash_of(&params))?;
    if !differing.is_empty() {
        return Err(format!("the parameters of ranks {differing:?} are not those of rank 0, bit for bit").into());
    }
    let t = peers.times();
    let times = peers.gather([t.compute.as_secs_f64(), t.comm.as_secs_f64(), t.exposed.as_secs_f64()])?;
    let times = times.iter().map(|[compute, comm, exposed]| Times {
        compute: std::time::Duration::from_secs_f64(*compute),
        comm: std::time::Duration::from_secs_f64(*comm),
        exposed: std::time::Duration::from_secs_f64(*exposed),
    });
    Ok(Outcome { params, epochs, times: times.collect() })
}

/// The sum of all ranks' scores.
fn gather_score(peers: &Exchange<'_>, mine: &Score) -> Result<Score, Failure> {
    let mut sum = Score::default();
    for [loss, correct, rows] in peers.gather([mine.loss, mine.correct as f64, mine.rows as f64])? {
        sum.add(&Score { loss, correct: correct as usize, rows: rows as usize });
    }
    Ok(sum)
}

fn hash_of(params: &[f32]) -> u64 {
    let mut hash = Fnv::default();
    for p in params {
        hash.write(&p.to_bits().to_le_bytes());
    }
    hash.finish()
}

/// The largest difference between two sets of parameters; NaN if either holds one.
pub(crate) fn max_difference(a: &[f32], b: &[f32]) -> f64 {
    let larger = |m: f64, d: f64| if d.is_nan() || d > m { d } else { m };
    a.iter().zip(b).map(|(a, b)| (f64::from(*a) - f64::from(*b)).abs()).fold(0.0, larger)
}

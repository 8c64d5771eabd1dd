//! The modules of the example `train_digits`, tested over worlds of threads.

#[path = "../examples/train_digits/agree.rs"]
mod agree;
#[path = "../examples/train_digits/data.rs"]
mod data;
#[path = "../examples/train_digits/exchange.rs"]
mod exchange;
mod memory_world;
#[path = "../examples/train_digits/net.rs"]
mod net;
#[allow(dead_code, reason = "the screen is for humans")]
#[path = "../examples/train_digits/report.rs"]
mod report;
#[path = "../examples/train_digits/rng.rs"]
mod rng;
#[path = "../examples/train_digits/train.rs"]
mod train;

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use rustcomms::{Communicator, Event, Observer, Operation, Time};

use crate::agree::agree;
use crate::data::{CLASSES, Dataset, PIXELS, shard};
use crate::exchange::{Exchange, Times, union};
use crate::memory_world::{Hook, world};
use crate::net::{Net, Pass};
use crate::report::Report;
use crate::rng::Rng;
use crate::train::{Config, Outcome, max_difference, steps_per_epoch, train, train_alone};

type Failure = Box<dyn std::error::Error + Send + Sync>;

const FINALIZE: Duration = Duration::from_secs(20);

/// Runs `body` on every rank of a world and returns what they return, by rank.
fn on_ranks<T: Send>(size: usize, hook: Option<Hook>, body: impl Fn(&Communicator) -> T + Sync) -> Vec<T> {
    let comms = world(size, hook).unwrap();
    std::thread::scope(|s| {
        let threads: Vec<_> = comms
            .iter()
            .map(|c| {
                let body = &body;
                s.spawn(move || body(c))
            })
            .collect();
        threads.into_iter().map(|t| t.join().unwrap()).collect()
    })
}

fn train_on(size: usize, data: &Dataset, cfg: &Config) -> Vec<Outcome> {
    on_ranks(size, None, |comm| {
        let outcome = train(comm, data, cfg, &mut ()).unwrap();
        comm.finalize(FINALIZE).unwrap();
        outcome
    })
}

/// Small enough for debug builds.
fn small() -> Config {
    Config { hidden: vec![24, 16], epochs: 3, batch: 50, ..Config::default() }
}

/// The first rows of the real file.
fn some_digits(rows: usize) -> Dataset {
    let text: String =
        include_str!("../examples/train_digits/data/digits.csv").split_inclusive('\n').take(rows).collect();
    Dataset::parse("some digits", &text, Some(rows)).unwrap()
}

fn bits(params: &[f32]) -> Vec<u32> {
    params.iter().map(|p| p.to_bits()).collect()
}

// --- data

#[test]
fn the_digits_are_complete_and_split_without_overlap() {
    let data = Dataset::embedded().unwrap();
    assert_eq!((data.train.len(), data.test.len()), (1437, 360));
    let mut rows: Vec<usize> = data.train.iter().chain(&data.test).copied().collect();
    rows.sort_unstable();
    assert_eq!(rows, (0..1797).collect::<Vec<_>>());
    // Shuffled: the held-out rows are not simply the last ones.
    assert!(data.test.iter().any(|r| *r < 1437));
    assert_eq!(data.test, Dataset::embedded().unwrap().test);
    // The first line of the file is a 0 whose third pixel is 5 of 16.
    assert_eq!(data.label(0), 0);
    assert_eq!(data.image(0)[2], 5.0 / 16.0);
    let counts: Vec<usize> = (0..10).map(|d| (0..1797).filter(|r| data.label(*r) == d).count()).collect();
    assert_eq!(counts, [178, 182, 177, 183, 181, 182, 181, 179, 174, 180]);
}

#[test]
fn a_bad_file_is_refused_with_the_line() {
    let good = format!("{}7\n", "16,".repeat(64));
    let says = |line: &str, what: &str| {
        let e = Dataset::parse("f.csv", &format!("{good}{good}{line}\n{good}"), None).unwrap_err();
        assert!(e.starts_with("f.csv, line 3: ") && e.contains(what), "{e}");
    };
    Dataset::parse("f.csv", &good.repeat(4), Some(4)).unwrap();
    says(&format!("{}7", "17,".repeat(64)), "value 1 is '17', but a pixel is a whole number 0 to 16");
    says(&format!("{}10", "0,".repeat(64)), "value 65 is '10', but a digit is a whole number 0 to 9");
    says(&format!("{}x,1", "0,".repeat(63)), "value 64 is 'x'");
    says(&format!("{}-1,1", "0,".repeat(63)), "value 64 is '-1'");
    says(&format!("{}1", "0,".repeat(63)), "64 values, but a row has 64 pixels and a digit");
    says(&format!("{}1,1", "0,".repeat(64)), "more than 65 values");
    says("", "value 1 is ''");
    let e = Dataset::parse("f.csv", &good.repeat(4), Some(5)).unwrap_err();
    assert_eq!(e, "f.csv: 4 rows instead of 5; is the file complete?");
    assert!(Dataset::parse("f.csv", "", None).unwrap_err().contains("too few"));
}

#[test]
fn shards_cover_every_row_once() {
    for size in 1..=17 {
        for rows in 0..=70 {
            let parts: Vec<_> = (0..size).map(|r| shard(rows, r, size)).collect();
            assert_eq!(parts.iter().cloned().flatten().collect::<Vec<_>>(), (0..rows).collect::<Vec<_>>());
            assert!(parts.iter().all(|p| p.len() == rows / size || p.len() == rows / size + 1));
        }
    }
}

#[test]
fn the_generator_is_splitmix64_and_shuffles_fairly() {
    // The reference sequence of seed 0; `new` mixes the stream into the seed, so undo that.
    let mut mixer = Rng::new(0, 0);
    let first = mixer.next();
    let mixed = 0xe220_a839_7b1d_cdaf_u64;
    assert_eq!(Rng::new(mixed, 0).next(), mixed);
    assert_ne!(first, mixed);
    // Each of 3! orders about equally often.
    let mut counts = std::collections::BTreeMap::new();
    let mut rng = Rng::new(5, 5);
    for _ in 0..6000 {
        let mut items = [0, 1, 2];
        rng.shuffle(&mut items);
        *counts.entry(items).or_insert(0) += 1;
    }
    assert!(counts.len() == 6 && counts.values().all(|c| (850..1150).contains(c)), "{counts:?}");
}

// --- network

/// Gradient and mean loss of `net` on `rows`.
fn gradients(net: &Net, data: &Dataset, rows: &[usize], scale: f64) -> (Vec<Vec<f64>>, f64) {
    let mut pass = Pass::new(net);
    pass.load(data, rows);
    net.forward(&mut pass);
    let score = net.score(&mut pass);
    let mut grads: Vec<Vec<f64>> = net.layers.iter().map(|l| vec![f64::NAN; l.params.len()]).collect();
    for layer in (0..net.layers.len()).rev() {
        net.gradient(&pass, layer, scale, &mut grads[layer]);
        if layer > 0 {
            net.propagate(&mut pass, layer);
        }
    }
    (grads, score.loss * scale)
}

#[test]
fn gradients_are_the_slopes_of_the_loss() {
    let data = some_digits(40);
    let mut net = Net::zeroed(&[PIXELS, 12, 9, CLASSES]);
    net.init(&mut Rng::new(3, 0));
    let rows = &data.train[..10];
    let (grads, _) = gradients(&net, &data, rows, 0.1);
    let mut rng = Rng::new(4, 0);
    for (layer, grads) in grads.iter().enumerate() {
        // All biases are at the end, weights before.
        let params = net.layers[layer].params.len();
        let picks: Vec<usize> = (0..60).map(|_| rng.below(params)).chain(params - 9..params).collect();
        let mut seen = 0;
        for i in picks {
            // Small, so that no ReLU switches on the way.
            let h = 5e-4f32;
            let p = net.layers[layer].params[i];
            let mut loss_at = |x: f32| {
                net.layers[layer].params[i] = x;
                gradients(&net, &data, rows, 0.1).1
            };
            let slope = (loss_at(p + h) - loss_at(p - h)) / f64::from((p + h) - (p - h));
            net.layers[layer].params[i] = p;
            let grad = grads[i];
            seen += usize::from(grad.abs() > 1e-3);
            assert!(
                (slope - grad).abs() < 1e-3 + 0.01 * grad.abs(),
                "layer {layer}, {i}: {grad} but the slope is {slope}"
            );
        }
        assert!(seen > 20, "layer {layer}: only {seen} gradients that are not about 0");
    }
}

#[test]
fn the_mean_of_uneven_shards_is_the_gradient_of_the_whole_batch() {
    let data = some_digits(40);
    let mut net = Net::zeroed(&[PIXELS, 8, CLASSES]);
    net.init(&mut Rng::new(3, 0));
    let batch = &data.train[..7];
    let (whole, _) = gradients(&net, &data, batch, 1.0 / 7.0);
    // Up to nine ranks for seven rows: some ranks have none.
    for size in 1..=9 {
        let parts: Vec<_> =
            (0..size).map(|r| gradients(&net, &data, &batch[shard(7, r, size)], size as f64 / 7.0).0).collect();
        for (layer, whole) in whole.iter().enumerate() {
            for (i, w) in whole.iter().enumerate() {
                let mean = parts.iter().map(|p| p[layer][i]).sum::<f64>() / size as f64;
                assert!((mean - w).abs() < 1e-14, "{size} ranks: {mean} and {w}");
            }
        }
    }
}

#[test]
fn a_score_counts_and_sums() {
    // Without weights, all digits are equally likely: the loss is ln 10 a row, and ties go to the last digit.
    let data = some_digits(40);
    let net = Net::zeroed(&[PIXELS, CLASSES]);
    let mut pass = Pass::new(&net);
    let rows: Vec<usize> = (0..40).collect();
    pass.load(&data, &rows);
    net.forward(&mut pass);
    let score = net.score(&mut pass);
    assert_eq!((score.rows, score.correct), (40, rows.iter().filter(|r| data.label(**r) == 9).count()));
    assert!((score.loss - 40.0 * 10f64.ln()).abs() < 1e-4);
}

// --- training

#[test]
fn one_rank_learns_the_digits() {
    let data = Dataset::embedded().unwrap();
    let cfg = Config { epochs: 10, ..Config::default() };
    let outcome = train_on(1, &data, &cfg).remove(0);
    let test = outcome.test();
    assert_eq!(test.rows, 360);
    assert!(test.correct >= 342, "{test:?}");
    let losses: Vec<f64> = outcome.epochs.iter().map(|e| e.train.loss).collect();
    assert!(outcome.epochs.iter().all(|e| e.train.rows == 1437));
    assert!(losses[9] < losses[0] / 5.0, "{losses:?}");
    // A world of one is the training without communication, to the bit.
    let alone = train_alone(&data, &Config { epochs: 1, ..cfg.clone() }, &mut ()).unwrap();
    let one = train_on(1, &data, &Config { epochs: 1, ..cfg }).remove(0);
    assert_eq!(bits(&alone.params), bits(&one.params));
}

#[test]
fn every_world_trains_to_the_parameters_of_one_rank() {
    let data = some_digits(300);
    let cfg = small();
    let alone = train_alone(&data, &cfg, &mut ()).unwrap();
    // 240 training rows in batches of 50, the last of 40: uneven for most worlds.
    for size in [2, 3, 5, 8] {
        let outcomes = train_on(size, &data, &cfg);
        for o in &outcomes {
            assert_eq!(bits(&o.params), bits(&outcomes[0].params));
            assert_eq!(o.times.len(), size);
            for (e, a) in o.epochs.iter().zip(&alone.epochs) {
                assert_eq!((e.train.rows, e.test), (240, a.test.clone_with_loss(e.test.loss)));
                assert!((e.train.loss - a.train.loss).abs() < 1e-2 && (e.test.loss - a.test.loss).abs() < 1e-2);
            }
        }
        let difference = max_difference(&outcomes[0].params, &alone.params);
        assert!(difference <= 1e-5, "{size} ranks differ by {difference:e}");
    }
    // It does learn, and so could differ.
    let start = train_alone(&data, &Config { rate: 1e-30, ..cfg }, &mut ()).unwrap();
    assert!(max_difference(&start.params, &alone.params) > 0.05);
}

impl net::Score {
    /// Counts are compared exactly, sums of rounded losses are not.
    fn clone_with_loss(&self, loss: f64) -> Self {
        Self { loss, ..*self }
    }
}

#[test]
fn ranks_without_rows_take_part() {
    // Batches of 3 rows for 5 ranks.
    let data = some_digits(15);
    let cfg = Config { batch: 3, hidden: vec![8], epochs: 2, ..Config::default() };
    assert_eq!(steps_per_epoch(&data, &cfg), 4);
    let alone = train_alone(&data, &cfg, &mut ()).unwrap();
    for o in train_on(5, &data, &cfg) {
        let difference = max_difference(&o.params, &alone.params);
        assert!(difference <= 1e-5, "{difference:e}");
    }
}

#[test]
fn a_diverging_training_ends_on_all_ranks() {
    let data = some_digits(300);
    let cfg = Config { rate: 1e30, ..small() };
    for r in on_ranks(2, None, |comm| train(comm, &data, &cfg, &mut ()).map(|_| ())) {
        let e = r.unwrap_err().to_string();
        assert!(e.contains("diverged in epoch 1") && e.contains("lower learning rate"), "{e}");
    }
}

/// Counts all_reduces of one rank that were called and that ended.
#[derive(Default)]
struct Calls {
    called: AtomicUsize,
    /// (called, ended) at each call.
    seen: Mutex<Vec<(usize, usize)>>,
    ended: AtomicUsize,
}

impl Observer for Calls {
    fn event(&self, event: &Event<'_>, _: Time) {
        match event {
            Event::Enqueued(c) if c.desc.operation == Operation::AllReduce => {
                let called = self.called.fetch_add(1, Ordering::SeqCst) + 1;
                self.seen.lock().unwrap().push((called, self.ended.load(Ordering::SeqCst)));
            }
            Event::Completed { call, .. } if call.desc.operation == Operation::AllReduce => {
                self.ended.fetch_add(1, Ordering::SeqCst);
            }
            _ => {}
        }
    }
}

#[test]
fn with_overlap_all_gradients_of_a_step_leave_before_the_first_is_back() {
    let data = some_digits(60);
    let cfg = Config { epochs: 1, ..small() };
    let calls: Vec<Arc<Calls>> = (0..2).map(|_| Arc::default()).collect();
    let gates = calls.clone();
    // No all_reduce of a step goes ahead until the rank has called those of all three layers: a training that
    // waits for one before it calls the next would never get there.
    let hook: Hook = Arc::new(move |rank| {
        let c = &gates[rank];
        let due = (c.ended.load(Ordering::SeqCst) / 3 + 1) * 3;
        let deadline = Instant::now() + Duration::from_secs(20);
        while c.called.load(Ordering::SeqCst) < due {
            assert!(Instant::now() < deadline, "the training waits for a gradient before it has sent all");
            std::thread::yield_now();
        }
    });
    let outcomes = on_ranks(2, Some(hook), |comm| {
        let _observing = comm.observe(Arc::clone(&calls[comm.rank()]) as Arc<dyn Observer>);
        train(comm, &data, &cfg, &mut ()).unwrap()
    });
    let steps = steps_per_epoch(&data, &cfg);
    assert!(calls.iter().all(|c| c.ended.load(Ordering::SeqCst) == 3 * steps));
    assert!(outcomes[0].times.iter().all(|t| !t.comm.is_zero() && !t.compute.is_zero()));
}

#[test]
fn without_overlap_no_two_gradients_are_on_their_way() {
    let data = some_digits(60);
    let cfg = Config { epochs: 1, overlap: false, ..small() };
    let calls: Vec<Arc<Calls>> = (0..2).map(|_| Arc::default()).collect();
    let outcomes = on_ranks(2, None, |comm| {
        let _observing = comm.observe(Arc::clone(&calls[comm.rank()]) as Arc<dyn Observer>);
        train(comm, &data, &cfg, &mut ()).unwrap()
    });
    for c in &calls {
        let seen = c.seen.lock().unwrap();
        assert!(seen.len() == 3 && seen.iter().all(|(called, ended)| *called == ended + 1), "{seen:?}");
    }
    // Waiting was all there was to communication (its start, too, is counted as waiting).
    assert!(outcomes[0].times.iter().all(|t| t.overlap() < 0.01), "{:?}", outcomes[0].times);
    let with = train_on(2, &data, &Config { overlap: true, ..cfg });
    assert_eq!(bits(&with[0].params), bits(&outcomes[0].params));
}

// --- exchange, agreement, report

#[test]
fn intervals_count_once_where_they_overlap() {
    let of = |list: &[(u64, u64)]| {
        let mut list: Vec<_> = list.iter().map(|(a, b)| (Time(*a), Time(*b))).collect();
        union(&mut list).as_nanos()
    };
    assert_eq!(of(&[]), 0);
    assert_eq!(of(&[(5, 9)]), 4);
    assert_eq!(of(&[(5, 9), (20, 21)]), 5);
    assert_eq!(of(&[(7, 12), (5, 9)]), 7);
    assert_eq!(of(&[(0, 100), (10, 20), (15, 30), (99, 101)]), 101);
}

#[test]
fn overlap_is_the_share_that_was_not_waited_for() {
    let times = |comm, exposed| Times {
        compute: Duration::ZERO,
        comm: Duration::from_millis(comm),
        exposed: Duration::from_millis(exposed),
    };
    assert_eq!(times(100, 25).overlap(), 0.75);
    assert_eq!(times(100, 101).overlap(), 0.0);
    assert_eq!(times(0, 0).overlap(), 0.0);
}

#[test]
fn numbers_are_gathered_and_compared_by_rank() {
    let all = on_ranks(3, None, |comm| {
        let peers = Exchange::new(Some(comm), 1, true);
        let rank = comm.rank() as f64;
        let gathered = peers.gather([rank, 10.0 * rank]).unwrap();
        (gathered, peers.differing(if comm.rank() == 2 { 6 } else { 5 }).unwrap(), peers.differing(1).unwrap())
    });
    for (gathered, differing, same) in all {
        assert_eq!(gathered, [[0.0, 0.0], [1.0, 10.0], [2.0, 20.0]]);
        assert_eq!(differing, [2]);
        assert!(same.is_empty());
    }
}

#[test]
fn ranks_that_cannot_start_or_differ_are_named() {
    let (data, other) = (some_digits(20), some_digits(21));
    let cfg = small();
    let says = |body: &(dyn Fn(usize) -> (Config, Option<Dataset>) + Sync)| -> Vec<String> {
        on_ranks(3, None, |comm| {
            let (cfg, data) = body(comm.rank());
            agree(comm, &cfg, data.as_ref(), FINALIZE).err().map_or_else(String::new, |e| e.to_string())
        })
    };
    assert_eq!(says(&|_| (cfg.clone(), Some(data.clone()))), ["", "", ""]);
    let unready = "ranks [1] could not start; their messages say why";
    // Rank 1 reports its own error.
    assert_eq!(says(&|r| (cfg.clone(), (r != 1).then(|| data.clone()))), [unready, "", unready]);
    let options = "ranks [2] were started with other options than rank 0";
    assert_eq!(says(&|r| (Config { seed: r as u64 / 2, ..cfg.clone() }, Some(data.clone()))), [options; 3]);
    let rows = "ranks [1, 2] read other data than rank 0";
    let of = |r| if r == 0 { data.clone() } else { other.clone() };
    assert_eq!(says(&|r| (cfg.clone(), Some(of(r)))), [rows; 3]);
}

#[test]
fn the_report_has_the_promised_fields() {
    let data = some_digits(60);
    let cfg = small();
    let outcome = train_on(2, &data, &cfg).remove(0);
    let mut bytes = Vec::new();
    Report::new(&outcome, 2.5e-7).write(&mut bytes).unwrap();
    let json: serde_json::Value = serde_json::from_slice(&bytes).unwrap();
    let keys: Vec<&str> = json.as_object().unwrap().keys().map(String::as_str).collect();
    let mut promised = ["test_accuracy", "max_param_diff", "compute_s", "comm_s", "overlap", "epochs"];
    promised.sort_unstable();
    assert_eq!(keys, promised);
    assert_eq!((&json["epochs"], &json["max_param_diff"]), (&3.into(), &2.5e-7.into()));
    assert_eq!(json["test_accuracy"], outcome.test().correct as f64 / 12.0);
    assert!(json["comm_s"].as_f64().unwrap() > 0.0 && (0.0..=1.0).contains(&json["overlap"].as_f64().unwrap()));
}

#[test]
fn differences_are_the_largest_and_do_not_hide_nan() {
    assert_eq!(max_difference(&[1.0, 2.0, -3.0], &[1.0, 2.5, -3.25]), 0.5);
    assert!(max_difference(&[1.0, f32::NAN, 5.0], &[1.0, 2.0, 1.0]).is_nan());
    assert_eq!(max_difference(&[], &[]), 0.0);
}

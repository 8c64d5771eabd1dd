//! The rows as JSON, and all of it as text.

use std::fmt::Write as _;

use serde_json::{Value, json};

use super::drive::{Results, Row, Table};
use super::limits::{Floor, Floors, floor_of, limit_us};
use super::options::{Options, Transport};
use super::ours;
use super::place::Placement;
use super::side::Side;
use super::stats::{Quartiles, ratios};

/// What a row comes to.
#[derive(Clone, Debug)]
pub struct Line {
    /// Pairs behind it, and those left out.
    pub pairs: (usize, usize),
    /// Of all pairs.
    pub placement: Option<Placement>,
    /// Microseconds.
    pub ours: Option<Quartiles>,
    /// Microseconds.
    pub peer: Option<Quartiles>,
    /// Theirs over ours; `None` where too few pairs survived.
    pub ratio: Option<Quartiles>,
    /// Microseconds.
    pub limit: Option<f64>,
    /// Why there is no ratio.
    pub note: Option<String>,
}

impl Line {
    /// Of this row.
    #[must_use]
    pub fn new(row: &Row, table: &Table, results: &Results, need: usize, cores: usize) -> Self {
        let (placement, pairs) = row.cell.best().map_or((None, &[][..]), |(p, pairs)| (Some(p.clone()), pairs));
        let ours_missing = ours::missing(table.transport);
        let of = |pick: fn(&(f64, f64)) -> f64| Quartiles::of(&pairs.iter().map(pick).collect::<Vec<_>>());
        let failed = |side| table.given_up(side, row.case.op).map(|e| format!("failed: {e}"));
        let few = || {
            (pairs.len() < need).then(|| {
                let why = if table.cut { "; the budget was over" } else { "" };
                format!("{} of {need} pairs survived, {} left out{why}", pairs.len(), row.cell.left_out())
            })
        };
        let note = failed(Side::Ours)
            .or_else(|| failed(Side::Peer(row.peer)))
            .or_else(few)
            .or_else(|| ours_missing.map(str::to_owned));
        let limit = placement.as_ref().and_then(|p| {
            let ns = results.probes.get(p).map_or(0.0, |(n, sum)| sum / (*n).max(1) as f64);
            limit(results.floors.get(p)?, row, table, cores, ns / 1e3)
        });
        Self {
            pairs: (pairs.len(), row.cell.left_out()),
            placement,
            ours: if ours_missing.is_some() { None } else { of(|p| p.0) },
            peer: of(|p| p.1),
            ratio: if note.is_none() { ratios(pairs) } else { None },
            limit,
            note,
        }
    }

    /// As a row of the JSON.
    #[must_use]
    pub fn json(&self, row: &Row, table: &Table) -> Value {
        let part = |q: &Option<Quartiles>, pick: fn(&Quartiles) -> f64| q.as_ref().map(pick);
        json!({
            "op": row.case.op.name(),
            "world": table.world,
            "bytes": row.case.nominal,
            "transport": table.transport.name(),
            "pinned": table.pinned,
            "peer": row.peer.name(),
            "ours_us": part(&self.ours, |q| q.median),
            "peer_us": part(&self.peer, |q| q.median),
            "ratio": part(&self.ratio, |q| q.median),
            "ratio_q1": part(&self.ratio, |q| q.q1),
            "ours_q1_us": part(&self.ours, |q| q.q1),
            "ours_q3_us": part(&self.ours, |q| q.q3),
            "peer_q1_us": part(&self.peer, |q| q.q1),
            "peer_q3_us": part(&self.peer, |q| q.q3),
            "limit_us": self.limit,
            "iterations": row.case.iterations,
            "bytes_run": row.case.bytes,
            "pairs": self.pairs.0,
            "left_out": self.pairs.1,
            "placement": self.placement.as_ref().map(ToString::to_string),
            "note": self.note,
        })
    }
}

fn limit(floors: &Floors, row: &Row, table: &Table, cores: usize, hop_us: f64) -> Option<f64> {
    let floor = floors.get(&floor_of(&row.case, table.transport, table.world))?;
    let (floor, hop) = match table.transport {
        Transport::Tcp => (floor, floors.get(&Floor { transport: Transport::Tcp, both: false, bytes: 4 })?),
        // A copy moves the bytes, a cache line from core to core tells that they are there.
        Transport::Shm => (floor + hop_us, hop_us),
    };
    Some(limit_us(&row.case, table.world, cores, floor, hop))
}

/// All rows, as an array.
#[must_use]
pub fn json_rows(o: &Options, results: &Results, cores: usize) -> String {
    let rows = results.tables.iter().flat_map(|t| {
        let need = o.need(t.world);
        t.rows.iter().map(move |r| Line::new(r, t, results, need, cores).json(r, t).to_string())
    });
    format!("[\n{}\n]\n", rows.collect::<Vec<_>>().join(",\n"))
}

/// What the results were measured on and with: `* name: value`.
pub type Context = Vec<(&'static str, String)>;

/// All of it, for people.
#[must_use]
pub fn markdown(o: &Options, results: &Results, context: &Context, cores: usize) -> String {
    let mut out = String::from("# Ours beside Open MPI and Gloo on one machine\n\n");
    if o.quick {
        out += "**A smoke test (`--quick`): too few pairs and iterations for any conclusion.**\n\n";
    }
    for (name, value) in context {
        let _ = writeln!(out, "* {name}: {value}");
    }
    out += METHOD;
    let total: usize = results.probes.values().map(|(n, _)| n).sum();
    out += "\n| placement | probes | share | mean one-way time |\n|---|---|---|---|\n";
    for (placement, (n, ns)) in &results.probes {
        let share = *n as f64 * 100.0 / total.max(1) as f64;
        let _ = writeln!(out, "| {placement} | {n} | {share:.0} % | {:.0} ns |", ns / (*n).max(1) as f64);
    }
    for table in &results.tables {
        let pinned = if table.pinned { "each rank on one core" } else { "not pinned" };
        let _ = writeln!(out, "\n## {} ranks, {}, {pinned}\n", table.world, table.transport.name());
        if let Some(why) = ours::missing(table.transport) {
            let _ = writeln!(out, "**{why}.** These rows show the peers alone, and have no ratio.\n");
        }
        if table.cut {
            out += "The budget (`--budget`) was over before every row had its pairs.\n\n";
        }
        out += "| op | bytes | peer | ours us | q1-q3 | peer us | q1-q3 | ratio | q1 | limit us | pairs | left out | placement |\n";
        out += "|---|---|---|---|---|---|---|---|---|---|---|---|---|\n";
        for row in &table.rows {
            let line = Line::new(row, table, results, o.need(table.world), cores);
            let us = |q: &Option<Quartiles>| {
                q.map_or(("-".to_owned(), "-".to_owned()), |q| {
                    (short(q.median), format!("{}-{}", short(q.q1), short(q.q3)))
                })
            };
            let ((ours, ours_q), (peer, peer_q)) = (us(&line.ours), us(&line.peer));
            let ratio = match (&line.ratio, &line.note) {
                (None, _) if ours::missing(table.transport).is_some() && line.pairs.0 >= o.need(table.world) => {
                    "none: no ours | -".to_owned()
                }
                (Some(r), _) => format!("**{:.2}** | {:.2}", r.median, r.q1),
                (None, note) => format!("none: {} | -", note.as_deref().unwrap_or("no pairs").replace('|', "/")),
            };
            let limit = line.limit.map_or("-".to_owned(), short);
            let placement = line.placement.map_or("-".to_owned(), |p| p.to_string());
            let bytes = if row.case.bytes == 0 { "-".to_owned() } else { size(row.case.nominal) };
            let _ = writeln!(
                out,
                "| {} | {bytes} | {} | {ours} | {ours_q} | {peer} | {peer_q} | {ratio} | {limit} | {} | {} | {placement} |",
                row.case.op.name(),
                row.peer.name(),
                line.pairs.0,
                line.pairs.1,
            );
        }
    }
    out += "\n## Floors\n\nShortest times of the bare programs behind the limits.\n\n";
    out += "| placement | transport | bytes | ways | us | GB/s each way |\n|---|---|---|---|---|---|\n";
    for (placement, floors) in &results.floors {
        for (f, us) in floors.iter() {
            let ways = if f.both { "both" } else { "one" };
            let rate = f.bytes as f64 / us / 1e3;
            let _ = writeln!(
                out,
                "| {placement} | {} | {} | {ways} | {} | {rate:.2} |",
                f.transport.name(),
                f.bytes,
                short(us)
            );
        }
    }
    let failures: Vec<&str> = results.failures().map(|(_, text)| text).collect();
    if !failures.is_empty() {
        out += "\n## Failures\n\nA launch that fails is no part of any row; ours is not started again, a peer up to three times.\n\n";
        failures.iter().for_each(|f| {
            let _ = writeln!(out, "* {f}");
        });
    }
    out
}

const METHOD: &str = "
## Method

All sides run the same operations with the same sizes and counts: check a result, warm up, barrier, N calls and a barrier on rank 0's clock, divided by N;
check a result again. f32, sum. Sizes: the buffer of all_reduce, broadcast and send_recv; what all ranks have together of all_gather (output) and
reduce_scatter (input); the send buffer of all_to_all; rounded up to a float for each rank. Broadcast rotates its root, so that calls depend on each other.
send_recv is half of a message there and back between ranks 0 and 1, and at the same time 2 and 3. Buffers are reused. Ours is the facade over backend-tcp;
Open MPI is used through `MPI_*` with `pml ob1`, over its TCP on `lo`, or over `vader` with its single copy (CMA); Gloo has TCP only between processes of one host, so rows of `shm`
show that. Its reduce_scatter is the class for it, as its present interface has none; that class writes its result over what it may still be sending
(rank 1 moves its block to the front of the buffer without waiting for the send), so that with long messages on a busy machine it is wrong now and then.

A round runs ours and the peers one after the other, every second time the other way round. Before and after each run a probe of 0.2 s passes a cache line
between the cores; a pair counts if its four probes agree, else it is dropped and repeated, up to three times the rounds. A row is made of pairs of one placement, that
of most; the others are left out, too. `ratio` is the median over pairs of theirs over ours in time (above 1 ours is faster), `q1` a quarter lies below. Where
too few pairs survived (9 in worlds of 2, 5 in larger ones), there is no ratio. Pinned ranks keep all threads of rank r on core r modulo cores, on all sides; for Gloo, which
has a thread of its own for its sockets, that is slow, and the tables without pinning are the fairer ones.

`limit` is what the machine can do at best in the same run: for tcp the same bytes (all_reduce: 2(n-1)/n of the buffer, each way at once; reduce_scatter,
all_gather, all_to_all: (n-1)/n; broadcast, send_recv: the buffer, one way; barrier: 4 bytes) between two threads on two cores that write and read bare sockets without
sleeping, framing or folding; for shm one copy of these bytes, by each core or by one, and the probe's one-way time. More ranks than cores take turns, which
multiplies what lies above the one-way time of 4 bytes. It is the shortest of all tries, not a median, so medians on a busy machine
are far from it; and a program that writes in a better order may go below.
";

fn short(x: f64) -> String {
    if x >= 100.0 {
        format!("{x:.0}")
    } else if x >= 10.0 {
        format!("{x:.1}")
    } else {
        format!("{x:.2}")
    }
}

/// `8 B`, `64 KiB`, `16 MiB`.
fn size(bytes: usize) -> String {
    match bytes {
        b if b >= 1 << 20 && b % (1 << 20) == 0 => format!("{} MiB", b >> 20),
        b if b >= 1 << 10 && b % (1 << 10) == 0 => format!("{} KiB", b >> 10),
        b => format!("{b} B"),
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::super::options::{Case, Op, Peer};
    use super::super::place::Distance;
    use super::super::rounds::{Cell, Timed};
    use super::*;

    fn cell(pairs: usize) -> Cell {
        let mut cell = Cell::default();
        for i in 0..pairs {
            let at = Placement(vec![Distance::Cache]);
            let run = |us: f64| Timed { us: vec![us], before: at.clone(), after: at.clone() };
            cell.add(0, Some(&run(2.0)), &run(4.0 + i as f64));
        }
        cell
    }

    fn results(transport: Transport, pairs: usize) -> Results {
        let case = Case::new(Op::AllGather, 8, 4, 1.0);
        let row = Row { case, peer: Peer::Gloo, cell: cell(pairs) };
        let table = Table {
            world: 4,
            transport,
            pinned: true,
            rows: vec![row],
            failures: BTreeMap::new(),
            cut: false,
            rounds: 5,
        };
        let mut floors = Floors::default();
        floors.add(floor_of(&case, transport, 4), 10.0);
        floors.add(Floor { transport, both: false, bytes: 4 }, 4.0);
        let at = Placement(vec![Distance::Cache]);
        Results { tables: vec![table], floors: [(at.clone(), floors)].into(), probes: [(at, (2, 100.0))].into() }
    }

    fn rows(o: &Options, r: &Results) -> Vec<Value> {
        serde_json::from_str(&json_rows(o, r, 2)).unwrap()
    }

    #[test]
    fn rows_have_their_shape() {
        let o = Options::parse(&[]).unwrap();
        let r = results(Transport::Tcp, 5);
        let row = &rows(&o, &r)[0];
        let head = json!({"op": "all_gather", "world": 4, "bytes": 8, "transport": "tcp", "pinned": true, "peer": "gloo",
            "ours_us": 2.0, "peer_us": 6.0, "ratio": 3.0, "ratio_q1": 2.5});
        for (key, value) in head.as_object().unwrap() {
            assert_eq!(&row[key], value, "{key}");
        }
        assert_eq!((&row["bytes_run"], &row["pairs"], &row["limit_us"]), (&json!(16), &json!(5), &json!(16.0)));
        assert_eq!((&row["placement"], &row["note"]), (&json!("same L3"), &Value::Null));
        let text = markdown(&o, &r, &vec![("machine", "M".into())], 2);
        assert!(text.contains("| all_gather | 8 B | gloo | 2.00 | 2.00-2.00 | 6.00 | 5.00-7.00 | **3.00** | 2.50 | 16.0 | 5 | 0 | same L3 |"), "{text}");
        assert!(text.contains("* machine: M"));
    }

    #[test]
    fn without_enough_pairs_there_is_no_ratio() {
        let o = Options::parse(&[]).unwrap();
        let r = results(Transport::Tcp, 4);
        let row = &rows(&o, &r)[0];
        assert_eq!((&row["ratio"], &row["ratio_q1"], &row["ours_us"]), (&Value::Null, &Value::Null, &json!(2.0)));
        assert!(row["note"].as_str().unwrap().contains("4 of 5 pairs survived"));
        assert!(markdown(&o, &r, &Vec::new(), 2).contains("none: 4 of 5 pairs"));
        let none = results(Transport::Tcp, 0);
        let row = &rows(&o, &none)[0];
        assert_eq!((&row["ours_us"], &row["peer_us"], &row["limit_us"]), (&Value::Null, &Value::Null, &Value::Null));
    }

    #[test]
    fn failures_and_what_ours_lacks_are_in_the_row() {
        let o = Options::parse(&[]).unwrap();
        let mut r = results(Transport::Tcp, 5);
        r.tables[0].failures.insert((Side::Ours, Op::AllGather), vec!["a wrong result".into()]);
        assert!(rows(&o, &r)[0]["note"].as_str().unwrap().contains("failed: a wrong result"));
        assert_eq!(rows(&o, &r)[0]["ratio"], Value::Null);
        assert!(markdown(&o, &r, &Vec::new(), 2).contains("three times.\n\n* a wrong result\n"));
        let mut r = results(Transport::Tcp, 5);
        r.tables[0].failures.insert((Side::Peer(Peer::Gloo), Op::AllGather), vec!["a wrong result".into()]);
        assert_eq!((&rows(&o, &r)[0]["note"], &rows(&o, &r)[0]["ratio"]), (&Value::Null, &json!(3.0)));
        let r = results(Transport::Shm, 5);
        let text = markdown(&o, &r, &Vec::new(), 2);
        assert!(
            text.contains("**ours has no shared-memory transport yet") && text.contains("| none: no ours | - |"),
            "{text}"
        );
        let row = &rows(&o, &r)[0];
        assert_eq!((&row["ours_us"], &row["peer_us"], &row["ratio"]), (&Value::Null, &json!(6.0), &Value::Null));
        assert!(row["note"].as_str().unwrap().contains("no shared-memory transport yet"));
    }

    #[test]
    fn numbers() {
        assert_eq!([short(0.057), short(12.34), short(1234.5)], ["0.06", "12.3", "1234"]);
        assert_eq!([size(8), size(1 << 10), size(256 << 20), size(1500)], ["8 B", "1 KiB", "256 MiB", "1500 B"]);
    }
}

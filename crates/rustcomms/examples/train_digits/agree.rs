//! Before the training: are all ranks ready for the same one?

use std::time::Duration;

use rustcomms::Communicator;

use crate::Failure;
use crate::data::Dataset;
use crate::train::Config;

/// Makes sure that every rank is ready and was started with the same options and data, so that otherwise all
/// end at once and say why. `data` is `None` on a rank that cannot go on.
pub(crate) fn agree(
    comm: &Communicator,
    cfg: &Config,
    data: Option<&Dataset>,
    timeout: Duration,
) -> Result<(), Failure> {
    let mine = match data {
        Some(data) => [1, cfg.fingerprint(), data.fingerprint()],
        None => [0; 3],
    };
    let mut all = vec![[0u64; 3]; comm.size()];
    comm.all_gather(&mine, all.as_flattened_mut())?;
    let ranks = |bad: &dyn Fn(&[u64; 3]) -> bool| -> Vec<usize> { (0..all.len()).filter(|r| bad(&all[*r])).collect() };
    let unready = ranks(&|a| a[0] == 0);
    let options = ranks(&|a| a[1] != all[0][1]);
    let rows = ranks(&|a| a[2] != all[0][2]);
    let why = if !unready.is_empty() {
        // Such a rank has its own, better message.
        if data.is_none() { None } else { Some(format!("ranks {unready:?} could not start; their messages say why")) }
    } else if !options.is_empty() {
        Some(format!("ranks {options:?} were started with other options than rank 0"))
    } else if !rows.is_empty() {
        Some(format!("ranks {rows:?} read other data than rank 0"))
    } else {
        return Ok(());
    };
    // Nobody goes on; an orderly end spares the others messages about lost peers.
    comm.finalize(timeout)?;
    why.map_or(Ok(()), |w| Err(w.into()))
}

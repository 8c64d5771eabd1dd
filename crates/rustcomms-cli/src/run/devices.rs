//! Which GPUs each local rank sees.
//!
//! The variables by which vendors' runtimes are told so are narrowed, never widened: what the launcher itself was given
//! is what is shared out. Nothing is asked of a driver.

/// NVIDIA's list; HIP reads it, too, where its own is not set.
const CUDA: &str = "CUDA_VISIBLE_DEVICES";
/// AMD's list for HIP; numbers count what `ROCR_VISIBLE_DEVICES` leaves.
const HIP: &str = "HIP_VISIBLE_DEVICES";
/// AMD's list for everything above the driver.
const ROCR: &str = "ROCR_VISIBLE_DEVICES";

/// The first `n` devices that `name` lists, or `None` if it is not set.
fn listed(name: &str, n: usize, var: &dyn Fn(&str) -> Option<String>) -> Result<Option<Vec<String>>, String> {
    let Some(value) = var(name) else { return Ok(None) };
    let all: Vec<&str> = value.split(',').map(str::trim).collect();
    // Runtimes stop at the first entry that names nothing.
    let mut good: Vec<String> = all
        .iter()
        .take_while(|d| !d.is_empty() && !d.starts_with('-') && **d != "NoDevFiles")
        .map(|d| (*d).into())
        .collect();
    if good.len() < n {
        let have = good.len();
        return Err(format!(
            "--gpus-per-node {n}, but {name}='{value}' lists {have}; unset it, or ask for at most {have}"
        ));
    }
    good.truncate(n);
    Ok(Some(good))
}

/// The variables of each of `ranks` local ranks, that share `gpus` devices of this node in the environment `var`.
///
/// With as many devices as ranks or a multiple, each rank gets its own; with fewer, that many ranks share each, if they
/// divide without rest. Anything else is an error, as some ranks would get more than others.
pub(super) fn shares(
    gpus: usize,
    ranks: usize,
    var: &dyn Fn(&str) -> Option<String>,
) -> Result<Vec<Vec<(&'static str, String)>>, String> {
    if gpus == 0 {
        return Err(
            "--gpus-per-node must be at least 1; leave it out to let every rank see what the launcher sees".into()
        );
    }
    if !gpus.is_multiple_of(ranks) && !ranks.is_multiple_of(gpus) {
        return Err(format!(
            "{ranks} ranks cannot share {gpus} GPUs evenly: -n must divide --gpus-per-node, or be a multiple of it"
        ));
    }
    let each = (gpus / ranks).max(1);
    let numbers = |n: usize| (0..n).map(|i| i.to_string()).collect::<Vec<_>>();
    let (cuda, hip, rocr) = (listed(CUDA, gpus, var)?, listed(HIP, gpus, var)?, listed(ROCR, gpus, var)?);
    let numeric = |l: &Vec<String>| l.iter().all(|d| d.bytes().all(|b| b.is_ascii_digit()));
    // What HIP would have seen, if that is not decided below it.
    let hip = match (hip, &cuda) {
        (Some(h), _) => Some(h),
        (None, Some(c)) if numeric(c) => Some(c.clone()),
        _ => None,
    };
    let cuda = cuda.unwrap_or_else(|| numbers(gpus));
    let share = |i: usize| {
        let first = i * gpus / ranks;
        let part = |list: &[String]| list[first..first + each].join(",");
        let mut vars = vec![(CUDA, part(&cuda))];
        match (&hip, &rocr) {
            (Some(h), _) => vars.push((HIP, part(h))),
            // Numbered anew among those left, and so that HIP does not take CUDA's list.
            (None, Some(r)) => vars.extend([(ROCR, part(r)), (HIP, numbers(each).join(","))]),
            (None, None) => vars.push((HIP, part(&numbers(gpus)))),
        }
        vars
    };
    Ok((0..ranks).map(share).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// `shares` in words: variables of a rank by spaces.
    fn shown(gpus: usize, ranks: usize, env: &[(&str, &str)]) -> Result<Vec<String>, String> {
        let var = |name: &str| env.iter().find(|(n, _)| *n == name).map(|(_, v)| (*v).to_owned());
        let short = |name: &str| name.split('_').next().unwrap_or_default().to_owned();
        let all = shares(gpus, ranks, &var)?;
        Ok(all.iter().map(|v| v.iter().map(|(n, v)| short(n) + "=" + v).collect::<Vec<_>>().join(" ")).collect())
    }

    #[test]
    fn devices_of_their_own() {
        assert_eq!(shown(2, 2, &[]).unwrap(), ["CUDA=0 HIP=0", "CUDA=1 HIP=1"]);
        assert_eq!(shown(4, 2, &[]).unwrap(), ["CUDA=0,1 HIP=0,1", "CUDA=2,3 HIP=2,3"]);
    }

    #[test]
    fn shared_devices() {
        assert_eq!(shown(1, 2, &[]).unwrap(), ["CUDA=0 HIP=0"; 2]);
        let two = ["CUDA=0 HIP=0", "CUDA=0 HIP=0", "CUDA=1 HIP=1", "CUDA=1 HIP=1"];
        assert_eq!(shown(2, 4, &[]).unwrap(), two);
    }

    #[test]
    fn lists_are_narrowed() {
        let cuda = |l| shown(2, 2, &[(CUDA, l)]).unwrap();
        assert_eq!(cuda("3,1,7"), ["CUDA=3 HIP=3", "CUDA=1 HIP=1"]);
        // Names are NVIDIA's, and say nothing about AMD's devices.
        assert_eq!(cuda("GPU-8f2a, MIG-1c0d/3/0"), ["CUDA=GPU-8f2a HIP=0", "CUDA=MIG-1c0d/3/0 HIP=1"]);
        assert_eq!(shown(2, 2, &[(HIP, "5,4"), (ROCR, "7,6,5,4,3,2")]).unwrap(), ["CUDA=0 HIP=5", "CUDA=1 HIP=4"]);
        let rocr = shown(4, 2, &[(ROCR, "GPU-a,GPU-b,2,3")]).unwrap();
        assert_eq!(rocr, ["CUDA=0,1 ROCR=GPU-a,GPU-b HIP=0,1", "CUDA=2,3 ROCR=2,3 HIP=0,1"]);
        // On AMD, too, CUDA's list counts among those that ROCR leaves.
        assert_eq!(shown(1, 1, &[(ROCR, "7,6"), (CUDA, "1")]).unwrap(), ["CUDA=1 HIP=1"]);
    }

    #[test]
    fn what_does_not_divide_or_is_not_there() {
        for (gpus, ranks) in [(3, 2), (2, 3), (8, 5), (4, 6)] {
            assert!(shown(gpus, ranks, &[]).unwrap_err().contains("evenly"), "{gpus} {ranks}");
        }
        assert!(shown(0, 1, &[]).unwrap_err().contains("at least 1"));
        for (list, have) in [("", 0), ("0", 1), ("-1", 0), ("0,-1,1", 1), ("NoDevFiles", 0), ("0,,1", 1)] {
            for name in [CUDA, HIP, ROCR] {
                let e = shown(2, 2, &[(name, list)]).unwrap_err();
                assert!(e.contains(name) && e.contains(&format!("lists {have}")), "{name}={list}: {e}");
            }
        }
    }
}

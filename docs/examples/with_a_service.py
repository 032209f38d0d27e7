"""Have a service convert a checkpoint, and wait for it."""

import sys

import reshard


def main(url: str, source: str, target: str) -> None:
    """Convert `source` to a universal checkpoint by the service at `url`."""
    try:
        result = reshard.convert(source, target, to="universal", url=url, wait_timeout=3600)
    except reshard.JobError as error:
        if error.code != "job.wait_timeout":
            raise
        sys.exit(f"{error.message}; {error.fix}")
    except reshard.ReshardError as error:
        sys.exit(f"{error.code}: {error.message}\nfix: {error.fix}")
    print(f"{len(result.files)} files in {result.target}")

    with reshard.Client(url) as client:
        for job in client.list(states=(reshard.JobState.SUCCEEDED,), page_size=5).jobs:
            print(job.id, job.request.target)


if __name__ == "__main__":
    main(*sys.argv[1:4])

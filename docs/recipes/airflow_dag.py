"""An Airflow DAG: a service makes a checkpoint for another number of GPUs, and the next task gets its path.

Airflow 3. The workers need `RESHARD_URL` and `RESHARD_TOKEN`, and Reshard without extras (docs/install.md).
"""

from __future__ import annotations

import logging
from datetime import timedelta
from typing import Any

from airflow.sdk import Param, dag, task
from airflow.sdk.exceptions import AirflowFailException

import reshard

logger = logging.getLogger(__name__)


@dag(
    schedule=None,
    params={
        "source": Param("s3://checkpoints/run1", type="string"),
        "target": Param("s3://checkpoints/run1-dp8/global_step500", type="string"),
        "dp": Param(8, type="integer", minimum=1),
    },
)
def resume_on_another_number_of_gpus() -> None:
    """Convert, then train."""

    @task(retries=5, retry_delay=timedelta(seconds=60), retry_exponential_backoff=True)
    def convert(params: dict[str, Any] | None = None, run_id: str | None = None) -> str:
        """Return the path of the new checkpoint. A second try finds the job of the first one by its key."""
        assert params is not None  # Airflow passes them by their name
        with reshard.Client() as client:
            try:
                job = client.submit(
                    params["source"], params["target"], to="zero", dp=params["dp"], idempotency_key=f"airflow-{run_id}"
                )
                if job.state is reshard.JobState.FAILED:
                    job = client.retry(job.id)
                client.wait(job.id)
                return client.result(job.id).target
            except reshard.ReshardError as error:
                if error.retryable:
                    raise
                # A missing rank is missing at the next try, too.
                raise AirflowFailException(str(error)) from error

    @task
    def train(path: str) -> None:
        """Stands for your launcher: what starts the training with this checkpoint."""
        logger.info("train.py --load %s", path)

    train(convert())


resume_on_another_number_of_gpus()

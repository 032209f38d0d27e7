"""How many examples the laws draw."""

from __future__ import annotations

from hypothesis import HealthCheck, Phase, core, settings

from house.seeds import run_seed

# For each of thirteen source formats: 200 examples of DeepSpeed's five and 520 in all, or 8,100. Nothing is remembered
# between runs (`database`): a run is its seed. Examples are whole checkpoints, hence the suppressed checks; making a
# failing one smaller takes minutes, which CI does not have: `laws-shrink` does it for a seed that failed there.
settings.register_profile(
    "laws",
    max_examples=40,
    deadline=None,
    database=None,
    phases=[Phase.generate],
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.large_base_example],
)
settings.register_profile("laws-shrink", settings.get_profile("laws"), phases=[Phase.generate, Phase.shrink])
settings.register_profile("laws-long", settings.get_profile("laws-shrink"), max_examples=625)


def laws_profile() -> settings:
    """The profile that `--hypothesis-profile` chose, once pytest has read it: the short one by default."""
    chosen = settings.get_current_profile_name()
    return settings.get_profile(chosen if chosen.startswith("laws") else "laws")


def laws_seed() -> int:
    """The seed of this run: that of `--hypothesis-seed`, else `run_seed`; printed with the table at the end."""
    given: int | None = core.global_force_seed
    return run_seed() if given is None else given

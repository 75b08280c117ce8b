"""Policies that come with pdinfer. Hosts know them as `pd.policy`.

    by_load.py         `round_robin`, `least_tokens`, `power_of_two`: each side by itself
    cache_aware.py     `cache_aware`: prefixes first, while queues are balanced
    traffic_aware.py   `traffic_aware`: what is predicted for each pair

May import: the ground.
"""

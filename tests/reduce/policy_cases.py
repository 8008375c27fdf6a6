"""Values of the policy terms by hand: for the fused loss and for the formulas under autograd."""

import math

import numpy as np

# log-ratio, advantage, dual clip → loss and its derivative; clip bounds 0.2 and 0.28.
CLIPPED_SURROGATE = [
    # Inside the clip: −A·r and its derivative −A·r.
    (math.log(1.1), 2.0, None, -2.2, -2.2),
    # Clipped above with A > 0, below with A < 0: constant.
    (math.log(2.0), 1.0, None, -1.28, 0.0),
    (math.log(0.5), -1.0, None, 0.8, 0.0),
    # Outside on the harmful side the clip does nothing: −A·r.
    (math.log(2.0), -1.0, None, 2.0, 2.0),
    (math.log(0.5), 1.0, None, -0.5, -0.5),
    # Dual clip caps it at −c·A.
    (math.log(5.0), -1.0, 3.0, 3.0, 0.0),
    (math.log(2.0), -1.0, 3.0, 2.0, 2.0),
    # A log-ratio of 100 is clamped to 20 before exp.
    (100.0, -1.0, None, math.exp(20), 0.0),
    (100.0, -1.0, 3.0, 3.0, 0.0),
]

# A policy and its reference over a vocabulary of three, and the exact expectation of each
# estimator: k1 and k3 are unbiased, k2 has a known bias.
POLICY, REFERENCE = np.array([0.5, 0.3, 0.2]), np.array([0.4, 0.4, 0.2])
_LOG_RATIO = np.log(POLICY / REFERENCE)
EXPECTED_KL = {
    "k1": POLICY @ _LOG_RATIO,
    "k2": POLICY @ _LOG_RATIO**2 / 2,
    "k3": POLICY @ _LOG_RATIO,
}

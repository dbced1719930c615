"""Making a drafter for a target: DSpark, distilled from the target's own answers, in DeepSpec's layout."""

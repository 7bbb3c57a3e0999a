"""Options of `ModelConfig` for embeddings of hashed n-grams."""

from dataclasses import dataclass

from jaxscale.choices import check_at_least

NGRAMS = ("ngram_rows",)
"""The settings of n-gram embeddings, not written for a model without them."""


@dataclass(frozen=True)
class NgramOptions:
    """The options of n-gram embeddings; without them `ngram_rows` is 0."""

    ngram_rows: int = 0  # of a table of embeddings of the last two and the last three tokens

    def check_ngrams(self, *, adapts: bool, has_encoder: bool, prediction_depth: int) -> None:
        """Refuses n-gram embeddings of models that they are not defined for.

        Raises:
          ValueError: with the setting to change.
        """
        check_at_least("model", self, ngram_rows=0)
        reasons = {
            "adapters train no embedding": adapts,
            "an encoder-decoder has two texts": has_encoder,
            "MTP modules embed later tokens, without their n-grams (model.prediction_depth)": bool(
                prediction_depth
            ),
        }
        for reason, applies in reasons.items():
            if self.ngram_rows and applies:
                raise ValueError(
                    f"model.ngram_rows = {self.ngram_rows} is not available: {reason}; set "
                    "model.ngram_rows = 0"
                )

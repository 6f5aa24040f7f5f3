"""Trains a CTC speech recognizer with SpeechBrain.

python examples/scripts/speechbrain_asr.py examples/scripts/speechbrain_asr.yaml
"""

import sys
from pathlib import Path

import speechbrain as sb
import torch
from hyperpyyaml import load_hyperpyyaml
from speechbrain.dataio.dataset import DynamicItemDataset

ALPHABET = " abcdefghijklmnopqrstuvwxyz"  # a character's class is its place here + 1


class ASR(sb.Brain):
    """Features, a CRDNN and CTC."""

    def compute_forward(self, batch, stage):
        """Returns the log-probabilities of each frame, and the relative lengths."""
        batch = batch.to(self.device)
        signals, lengths = batch.sig
        features = self.hparams.compute_features(signals)
        features = self.modules.normalize(features, lengths)
        hidden = self.modules.encoder(features)
        return self.hparams.log_softmax(self.modules.classify(hidden)), lengths

    def compute_objectives(self, predictions, batch, stage):
        """Returns the CTC loss."""
        scores, lengths = predictions
        tokens, token_lengths = batch.tokens
        return self.hparams.ctc_cost(scores, tokens, lengths, token_lengths)

    def on_stage_end(self, stage, stage_loss, epoch=None):
        """Logs the losses, and keeps the best checkpoint."""
        if stage == sb.Stage.TRAIN:
            self.train_loss = stage_loss
        elif stage == sb.Stage.VALID:
            self.hparams.train_logger.log_stats(
                {"epoch": epoch},
                train_stats={"loss": self.train_loss},
                valid_stats={"loss": stage_loss},
            )
            self.checkpointer.save_and_keep_only(
                {"loss": stage_loss}, min_keys=["loss"]
            )


def make_dataset(manifest, sample_rate):
    """Makes the data set of a manifest; the audio is made, too: each character has a pitch of its own."""

    @sb.utils.data_pipeline.takes("text")
    @sb.utils.data_pipeline.provides("tokens")
    def tokens_of(text):
        return torch.tensor([ALPHABET.index(char) + 1 for char in text])

    @sb.utils.data_pipeline.takes("duration", "tokens")
    @sb.utils.data_pipeline.provides("sig")
    def audio_of(duration, tokens):
        num_samples = int(duration * sample_rate)
        spoken = torch.arange(num_samples) * len(tokens) // num_samples
        pitches = 200 * 1.1 ** tokens[spoken]
        tone = torch.sin(2 * torch.pi * torch.cumsum(pitches / sample_rate, 0))
        return tone + 0.1 * torch.randn(num_samples)

    pipelines = [tokens_of, audio_of]
    return DynamicItemDataset.from_csv(
        manifest, dynamic_items=pipelines, output_keys=["id", "sig", "tokens"]
    )


def main():
    """Trains as the hyperparameters say."""
    hparams_file, run_opts, overrides = sb.parse_arguments(sys.argv[1:])
    with open(hparams_file) as stream:
        hparams = load_hyperpyyaml(stream, overrides)
    sb.create_experiment_directory(hparams["output_folder"], hparams_file, overrides)
    folder = Path(hparams_file).parent
    train, valid = (
        make_dataset(folder / hparams[name], hparams["sample_rate"])
        for name in ("train_csv", "valid_csv")
    )
    brain = ASR(
        modules=hparams["modules"],
        opt_class=hparams["opt_class"],
        hparams=hparams,
        run_opts=run_opts,
        checkpointer=hparams["checkpointer"],
    )
    brain.fit(
        hparams["epoch_counter"],
        train,
        valid,
        train_loader_kwargs=hparams["train_dataloader_opts"],
        valid_loader_kwargs=hparams["valid_dataloader_opts"],
    )


if __name__ == "__main__":
    main()

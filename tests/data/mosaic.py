"""mosaicml-streaming's own reader, writer and compression: the independent truth of ours."""

from __future__ import annotations

import sys

from hybridtron.storage.mosaic import imported

UPLOAD = "streaming.base.storage.upload"
sys.modules.setdefault(UPLOAD, imported(UPLOAD))  # where MDSWriter, even of a local folder, looks for it
compression = imported("streaming.base.compression")
MDSReader = imported("streaming.base.format.mds.reader").MDSReader
MDSWriter = imported("streaming.base.format.mds.writer").MDSWriter
UPLOAD = "streaming.base.storage.upload"
sys.modules[UPLOAD] = imported(UPLOAD)  # where MDSWriter, even of a local folder, looks for it

"""Bugs planted in the data plane: shard objects past the page cache, and the reader that takes samples by byte range."""

from tests.mutants.mutant import Mutant, tests

FILES = "tests/unit/adapters/store/test_object_files.py"
WRITER = "tests/unit/adapters/store/test_local_shard_writer.py"
POWER_CUT = "tests/unit/adapters/store/test_power_cut.py"
MEMORY = "tests/unit/statetap_client/test_reader_memory.py"
RANGES = "tests/unit/statetap_client/test_byte_ranges.py"

MUTANTS = (
    Mutant(
        name="token-writers-fail-unheard",
        file="service/statetap/adapters/store/token_shards.py",
        old="            for written in writing:\n                written.result()\n",
        new="",
        catcher=tests("tests/unit/adapters/store/test_token_shards.py"),
        breaks="tokens are durable when `write_tokens` returns: no shard that a thread failed to write is passed over",
    ),
    Mutant(
        name="writer-adopts-other-bytes",
        file="service/statetap/adapters/store/local_shard_writer.py",
        old="        while window := file.read(WINDOW_BYTES):\n",
        new="        if window := file.read(WINDOW_BYTES):\n",
        catcher=tests(WRITER, "-k", "compared_to_its_end"),
        breaks="invariant 4: what is published under a name is what was written, or nothing",
    ),
    Mutant(
        name="writer-index-checksum-off",
        file="clients/python/statetap_client/sharding.py",
        old="    return body + crc32c.crc32c(body).to_bytes(",
        new="    return body + (crc32c.crc32c(body) ^ 1).to_bytes(",
        catcher=tests("tests/unit/statetap_client/test_sharding.py"),
        breaks="every Zarr library reads the store: the index carries its crc32c",
    ),
    Mutant(
        name="writer-loses-the-last-page",
        file="service/statetap/adapters/store/object_files.py",
        old="        self._copy(buffer[to_boundary + direct :])\n",
        new="",
        catcher=tests(FILES),
        breaks="a sample that ends within a page keeps its last rows",
    ),
    Mutant(
        name="writer-does-not-bounce-other-phases",
        file="service/statetap/adapters/store/object_files.py",
        old="        if not direct or (address_of(buffer) + to_boundary) % self._alignment.memory:\n",
        new="        if not direct:\n",
        catcher=tests(FILES),
        breaks="plain dumps, whose tensors begin anywhere, are written past the page cache too",
    ),
    Mutant(
        name="writer-syncs-before-the-index",
        file="service/statetap/adapters/store/object_files.py",
        old="""        nbytes = self._written + self._filled
        if self._filled:
            self._bounce[self._filled : self._block] = 0
            self._filled = self._block
            self._flush()
        os.ftruncate(self._descriptor, nbytes)
        os.fsync(self._descriptor)
""",
        new="""        nbytes = self._written + self._filled
        os.fsync(self._descriptor)
        if self._filled:
            self._bounce[self._filled : self._block] = 0
            self._filled = self._block
            self._flush()
        os.ftruncate(self._descriptor, nbytes)
""",
        catcher=tests(FILES, "-k", "synced"),
        breaks="an object that has its name survives a power cut whole",
    ),
    Mutant(
        name="writer-forgets-private-memory",
        file="service/statetap/adapters/store/direct_io.py",
        old='            if permissions[3] == "s":\n',
        new='            if permissions[3] == "s" or "rw-p" in permissions and "[heap]" not in line:\n',
        catcher=tests("tests/unit/adapters/store/test_direct_io.py", "-k", "private and mapping"),
        breaks="only pages that the kernel has elsewhere are dropped",
    ),
    Mutant(
        name="writer-forgets-what-lies-where-a-dump-was",
        file="service/statetap/adapters/store/direct_io.py",
        old="        self._spans.sort()\n",
        new="        self._spans = shared\n",
        catcher=tests("tests/unit/adapters/store/test_direct_io.py", "-k", "another_dump"),
        breaks="what is written is what was hashed, whatever is unmapped meanwhile",
    ),
    Mutant(
        name="writer-publishes-for-nobody",
        file="service/statetap/adapters/store/unit_attempts.py",
        old="            self._publish_all(objects)\n            self._check()\n",
        new="            self._publish_all(objects)\n",
        catcher=tests(WRITER, "-k", "left_while_it_was_published"),
        breaks="an uncommitted unit is always safe to do again: a cancelled attempt leaves nothing",
    ),
    Mutant(
        name="reader-gives-the-neighbours-rows",
        file="clients/python/statetap_client/shard_files.py",
        old="            yield ByteRange(int(offsets[start]) + inside * self.row_bytes, nbytes,",
        new="            yield ByteRange(int(offsets[start]), nbytes,",
        catcher=tests(MEMORY, "-k", "any_rows"),
        breaks="a sample's rows are its own, not those of whoever begins the chunk",
    ),
    Mutant(
        name="reader-reads-gaps-into-samples",
        file="clients/python/statetap_client/byte_ranges.py",
        old="            views.append(_GAP[: wanted.offset - end])\n",
        new="            pass\n",
        catcher=tests(RANGES),
        breaks="neighbours that are read in one call keep to their own bytes",
    ),
    Mutant(
        name="reader-takes-any-digest",
        file="clients/python/statetap_client/reader.py",
        old="            if whole != self.recorded_digest(index):\n",
        new="            if False:\n",
        catcher=tests(MEMORY, "-k", "digests"),
        breaks="digests on demand: bytes that are not those that were written are refused",
    ),
    Mutant(
        name="reader-reuses-memory-under-a-worker",
        file="clients/python/statetap_client/sample_memory.py",
        old="        if in_dataloader_worker():\n            raise",
        new="        if False:\n            raise",
        catcher=tests(MEMORY, "-k", "refused_in_a_worker"),
        breaks="a DataLoader's worker never overwrites a sample that is on its way",
    ),
    Mutant(
        name="writer-syncs-no-bytes",
        file="service/statetap/adapters/store/object_files.py",
        old="        os.ftruncate(self._descriptor, self._position)\n        os.fsync(self._descriptor)\n",
        new="        os.ftruncate(self._descriptor, self._position)\n",
        catcher=tests(POWER_CUT),
        breaks="a commit is recorded of what a power cut leaves",
    ),
    Mutant(
        name="writer-loses-whole-windows",
        file="service/statetap/adapters/store/shard_assembly.py",
        old="                yield window\n                window, nbytes",
        new="                window, nbytes",
        catcher=tests("tests/unit/adapters/store/test_shard_objects.py"),
        breaks="an object is all of its rows, however many windows they fill",
    ),
    Mutant(
        name="writer-passes-over-what-a-disk-said",
        file="service/statetap/adapters/store/direct_io.py",
        old="        if code != errno.ENOSYS:\n",
        new="        if code not in _NOT_SUPPORTED:\n",
        catcher=tests(FILES, "-k", "disk_says"),
        breaks="a window that a disk could not write fails its object: nobody says so a second time",
    ),
    Mutant(
        name="writer-stages-past-a-window",
        file="service/statetap/adapters/store/object_files.py",
        old="                if self._filled == WINDOW_BYTES:\n                    self._flush()\n",
        new="                if self._filled == WINDOW_BYTES:\n                    self._filled = 0\n",
        catcher=tests(FILES, "-k", "staged_bytes"),
        breaks="an object is all of its bytes, however many windows it is staged in",
    ),
    Mutant(
        name="writer-drops-what-is-not-written-yet",
        file="service/statetap/adapters/store/object_files.py",
        old="                wait_for_written(self._descriptor, arriving, WINDOW_BYTES)\n",
        new="",
        catcher=tests(FILES, "-k", "leave_the_page_cache"),
        breaks="the page cache holds a few windows of an object, whatever its size",
    ),
    Mutant(
        name="writer-syncs-no-names",
        file="service/statetap/adapters/store/local_shard_writer.py",
        old="            for directory in _directories(self._root, written.key):\n                fsync_directory(directory)\n",
        new="",
        catcher=tests(POWER_CUT),
        breaks="a commit is recorded of what a power cut leaves, names included",
    ),
    Mutant(
        name="store-syncs-no-metadata",
        file="service/statetap/adapters/store/durable_files.py",
        old="            os.fsync(descriptor)\n        finally:\n            os.close(descriptor)\n        temporary.replace(path)\n",
        new="        finally:\n            os.close(descriptor)\n        temporary.replace(path)\n",
        catcher=tests(POWER_CUT),
        breaks="a job starts in a store that a power cut leaves",
    ),
)

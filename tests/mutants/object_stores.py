"""Bugs planted in stores at object stores."""

from tests.mutants.mutant import Mutant, tests

OBJECTS = "service/statetap/adapters/store/remote_objects.py"
REMOTE = "service/statetap/adapters/store/remote_shard_writer.py"
WRITER = "tests/unit/adapters/store/test_remote_shard_writer.py"
LOCATIONS = "tests/unit/test_store_locations.py"

MUTANTS = (
    Mutant(
        name="objects-are-overwritten",
        file=OBJECTS,
        old='key, data, mode="create", use_multipart=False)',
        new='key, data, mode="overwrite", use_multipart=False)',
        catcher=tests(WRITER, "-k", "never_replaced"),
        breaks="invariant 4: a committed object is never replaced, at an object store either",
    ),
    Mutant(
        name="objects-adopts-other-bytes",
        file=OBJECTS,
        old="        return hasher.intdigest() == sent.digest\n",
        new="        return True\n",
        catcher=tests(WRITER, "-k", "never_replaced"),
        breaks="invariant 4: what is published under a name is what was written, or nothing",
    ),
    Mutant(
        name="objects-of-a-failed-unit-stay",
        file=REMOTE,
        old="        for sent in self._made:\n",
        new="        for sent in ():\n",
        catcher=tests(WRITER, "-k", "cancelled_attempt or takes_back"),
        breaks="an uncommitted unit is always safe to do again: an attempt that failed leaves nothing",
    ),
    Mutant(
        name="objects-lost-answers-are-believed",
        file=REMOTE,
        old="                if self._objects.holds(sent):\n                    self._unanswered.remove(sent)\n                    return True\n",
        new="                self._unanswered.remove(sent)\n                return True\n",
        catcher=tests(WRITER, "-k", "server_that_fails"),
        breaks="a shard is committed only once its object is there",
    ),
    Mutant(
        name="store-url-beside-the-allowed-one",
        file="service/statetap/core/object_urls.py",
        old='    return url.startswith(f"{prefix}/")\n',
        new="    return url.startswith(prefix)\n",
        catcher=tests(LOCATIONS, "-k", "any_other_url"),
        breaks="a store is below a configured object store, or refused",
    ),
    Mutant(
        name="store-url-anywhere",
        file="service/statetap/main.py",
        old="    if not any(lies_below(url, prefix) for prefix in settings.object_stores):\n",
        new="    if not settings.object_stores:\n",
        catcher=tests(LOCATIONS, "-k", "any_other_url"),
        breaks="a store is below a configured object store, or refused",
    ),
    Mutant(
        name="store-url-climbs",
        file="service/statetap/core/object_urls.py",
        old='or not part.strip("."):\n',
        new=":\n",
        catcher=tests(LOCATIONS, "-k", "any_other_url"),
        breaks="a store's URL has one spelling: no `..` leads out of what is allowed",
    ),
)

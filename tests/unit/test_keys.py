"""Key files, tokens, and the settings that decide whether a node uses a key."""

import errno
import os
import re
import stat
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest.mock import Mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chaosnet.errors import ConfigError
from chaosnet.identity import completed, completed_peer, default_file, identity, is_loopback
from chaosnet.invite import MARK, MAX_SEEDS, Token, is_token
from chaosnet.node.endpoint import KEY, Endpoint
from chaosnet.node.keys import KeyPair, is_there, key_bytes, key_text, load, load_allowed, save
from chaosnet.settings.groups import Cluster
from chaosnet.settings.resolved import node_settings

PAIR = KeyPair.new()


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    """No key of anybody's, and an environment of our own."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    for name in [name for name in os.environ if name.startswith("CHAOSNET_")]:
        monkeypatch.delenv(name)
    return tmp_path


# --- key pairs and files ---


def test_force_replaces_nothing_but_a_key(tmp_path):
    other = tmp_path / "thesis.txt"
    other.write_text("years of work\n")
    with pytest.raises(ConfigError, match=r"thesis.txt: --force replaces a key, and this is none"):
        save(PAIR, other, force=True)
    assert other.read_text() == "years of work\n"


@given(st.binary(min_size=32, max_size=32))
def test_a_key_is_52_letters_and_digits_and_back(raw):
    assert KEY.fullmatch(key_text(raw)) and key_bytes(key_text(raw)) == raw


def test_the_public_key_follows_from_the_secret_one_which_is_never_shown():
    assert KeyPair.of(PAIR.secret) == PAIR
    for shown in (repr(PAIR), str(PAIR), repr(node_settings(Cluster(insecure=True))), repr(Token(PAIR, ()))):
        assert key_text(PAIR.secret) not in shown and repr(PAIR.secret)[2:-1] not in shown
    assert PAIR.public in repr(PAIR)


def test_a_key_file_is_for_its_user_alone_and_is_not_replaced_by_chance(tmp_path):
    file = tmp_path / "deep" / "key"
    save(PAIR, file)
    assert stat.S_IMODE(file.stat().st_mode) == 0o600 and load(file) == PAIR
    with pytest.raises(ConfigError, match="there is a key already"):
        save(KeyPair.new(), file)
    assert load(file) == PAIR
    save(other := KeyPair.new(), file, force=True)
    assert load(file) == other and stat.S_IMODE(file.stat().st_mode) == 0o600


def test_of_machines_that_see_one_folder_the_first_makes_the_key_of_all(tmp_path):
    file = default_file()
    start = threading.Barrier(8)

    def launched(number):
        start.wait()
        return identity(make=True)

    with ThreadPoolExecutor(8) as machines:
        found = {*machines.map(launched, range(8))}
    assert found == {load(file)}
    assert [*file.parent.iterdir()] == [file], "no draft is left"


@pytest.mark.parametrize("there", [False, True])
def test_a_key_is_kept_where_there_are_no_hard_links(tmp_path, monkeypatch, there):
    monkeypatch.setattr(Path, "hardlink_to", Mock(side_effect=PermissionError(1, "Operation not permitted")))
    file = tmp_path / "key"
    if there:
        save(KeyPair.new(), file, force=True)
        with pytest.raises(ConfigError, match="there is a key already"):
            save(PAIR, file)
        return
    save(PAIR, file)
    assert load(file) == PAIR and [*tmp_path.glob("*key*")] == [file]


def test_a_folder_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"file/key: the key cannot be written \(File exists\)"):
        save(PAIR, tmp_path / "file" / "key")


@pytest.mark.parametrize("content", ["", "# nothing\n", "secret\n", "a\nb\n", 51 * "z" + "z"])
def test_a_file_without_a_key_is_named_and_its_content_is_not_told(tmp_path, content):
    file = tmp_path / "key"
    file.write_text(content)
    file.chmod(0o600)
    with pytest.raises(ConfigError, match="there is no key in it") as error:
        load(file)
    assert not content.strip() or content.strip() not in str(error.value)


def test_a_key_that_others_can_read_is_refused(tmp_path):
    file = tmp_path / "key"
    save(PAIR, file)
    file.chmod(0o640)
    with pytest.raises(ConfigError, match=r"others can read this key.*chmod 600"):
        load(file)


def test_a_missing_key_file_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"missing.key: the key cannot be read.*keygen"):
        load(tmp_path / "missing.key")


def test_allowed_keys_are_one_a_line_and_a_wrong_line_is_named(tmp_path):
    file = tmp_path / "allowed"
    file.write_text(f"# of the lab\n\n{PAIR.public}  # the laptop\n")
    assert load_allowed(file) == (PAIR.public,)
    file.write_text(f"{PAIR.public}\nsomething\n")
    with pytest.raises(ConfigError, match="allowed, line 2: no public key"):
        load_allowed(file)


# --- tokens ---


def test_a_token_carries_the_seeds_with_their_keys_and_the_secret_of_the_invite():
    seeds = tuple(f"{KeyPair.new().public}@10.0.0.{host}:5555" for host in range(3))
    token = Token(PAIR, seeds)
    text = token.encode()
    assert is_token(text) and Token.parse(text) == token and Token.parse(f" {text}\n") == token
    assert text.replace("-", "").replace("_", "").isalnum(), "no quotes are needed in any shell"
    assert len(Token.parse(Token(PAIR, 3 * seeds).encode()).seeds) == MAX_SEEDS


@given(st.text(alphabet="abcABC019-_=é ", max_size=200))
def test_what_is_no_token_is_an_error_that_does_not_repeat_it(text):
    with pytest.raises(ConfigError, match="damaged or not complete") as error:
        Token.parse(MARK + text)
    assert len(text) < 4 or text.strip() not in str(error.value)


@given(st.data())
def test_a_token_with_a_letter_lost_or_changed_is_an_error(data):
    text = Token(PAIR, (f"{PAIR.public}@h:1",)).encode()
    place = data.draw(st.integers(len(MARK), len(text) - 2))
    other = data.draw(st.sampled_from([letter for letter in "aA7-" if letter != text[place]]))
    for damaged in (text[:place] + text[place + 1 :], text[:place] + other + text[place + 1 :]):
        with pytest.raises(ConfigError):
            Token.parse(damaged)


# --- which key a node uses ---


def test_the_users_own_key_is_taken_if_there_is_one_and_none_if_keys_are_not_wanted(monkeypatch):
    assert identity() is None
    save(PAIR, default_file())
    assert identity() == PAIR and identity(insecure=True) is None
    monkeypatch.setenv("CHAOSNET_INSECURE", "1")
    assert identity() is None


def test_a_home_that_is_closed_to_this_user_is_named(monkeypatch):
    """As `sudo -u` leaves it."""
    file = default_file()

    def closed(path, **how):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))

    monkeypatch.setattr(Path, "stat", closed)
    said = re.escape(f"{file}: the key cannot be read (Permission denied")
    for make in (False, True):
        with pytest.raises(ConfigError, match=said):
            identity(make=make)
    with pytest.raises(ConfigError, match="--force replaces a key, and this is none"):
        save(PAIR, file, force=True)
    assert identity(insecure=True) is None


def test_a_home_that_is_no_folder_has_no_key(tmp_path):
    (tmp_path / "null").touch()
    assert not is_there(tmp_path / "null" / "key")


def test_a_key_beside_insecure_is_an_error(tmp_path, monkeypatch):
    save(PAIR, tmp_path / "key")
    monkeypatch.setenv("CHAOSNET_KEY", str(tmp_path / "key"))
    assert identity() == PAIR
    with pytest.raises(ConfigError, match="beside --insecure"):
        identity(insecure=True)


def test_an_address_without_a_key_is_one_of_this_users_own_nodes():
    assert completed("10.0.0.2:5555", PAIR) == f"{PAIR.public}@10.0.0.2:5555"
    assert completed("10.0.0.2:5555", None) == "10.0.0.2:5555"
    other = f"{KeyPair.new().public}@10.0.0.2:5555"
    assert completed(other, PAIR) == other
    assert completed_peer("10.0.0.2:5555", PAIR) == f"{PAIR.public}@10.0.0.2:5555"
    assert completed_peer("worker-3", PAIR) == "worker-3"


@pytest.mark.parametrize("listen", ["10.0.0.2:5555", "0.0.0.0:5555", "[::]:5555", "lab.example:5555", "*:0"])
def test_to_be_reached_from_elsewhere_takes_a_key_or_insecure_and_the_error_says_both(listen):
    with pytest.raises(ConfigError, match=r"chaosnet keygen.*--insecure") as error:
        node_settings(Cluster(listen=listen))
    assert listen in str(error.value)
    assert node_settings(Cluster(listen=listen, insecure=True)).keys is None
    save(PAIR, default_file())
    assert node_settings(Cluster(listen=listen)).keys == PAIR


@pytest.mark.parametrize("listen", ["127.0.0.1:0", "localhost:5555", "[::1]:5555", "127.8.8.8:1"])
def test_loopback_needs_neither(listen):
    assert is_loopback(Endpoint.parse(listen).host) and node_settings(Cluster(listen=listen)).keys is None


def test_iperf3_whose_port_is_open_to_everybody_takes_insecure():
    save(PAIR, default_file())
    with pytest.raises(ConfigError, match=r"'iperf3' opens a port to everybody.*--insecure"):
        node_settings(Cluster(probe="iperf3"))
    assert node_settings(Cluster(probe="iperf3", insecure=True)).probe == "iperf3"


def test_who_comes_with_an_invite_and_has_no_key_gets_one_that_is_introduced(monkeypatch):
    introduced = []
    monkeypatch.setattr(
        "chaosnet.settings.resolved.introduce", lambda token, keys: introduced.append((token.keys, keys))
    )
    seed = f"{KeyPair.new().public}@10.0.0.2:5555"
    found = node_settings(Cluster(join=Token(PAIR, (seed,)).encode()))
    assert found.join == (seed,)
    assert found.keys == load(default_file())
    assert found.introduce is not None
    found.introduce()
    assert introduced == [(PAIR, found.keys)]
    assert node_settings(Cluster(join=Token(PAIR, (seed,)).encode())).keys == found.keys, "and keeps it"


def test_allowed_keys_without_an_own_one_is_an_error(tmp_path):
    (tmp_path / "allowed").write_text(PAIR.public)
    with pytest.raises(ConfigError, match="no key of its own"):
        node_settings(Cluster(allowed_keys=str(tmp_path / "allowed")))


def test_a_node_trusts_whom_its_user_names_and_tells_only_of_whom_it_allows(tmp_path):
    save(PAIR, default_file())
    seed, allowed = KeyPair.new().public, KeyPair.new().public
    Path(tmp_path / "allowed").write_text(allowed)
    ring = node_settings(
        Cluster(join=f"{seed}@10.0.0.2:5555", allowed_keys=str(tmp_path / "allowed"))
    ).keyring()
    assert ring is not None
    assert ring.all_known(0.0).allowed == tuple(sorted((PAIR.public, allowed))) and ring.named == {seed}

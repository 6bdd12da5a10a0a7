"""Sessions hand requests over between the event loops of a server and of the rollouts: in order, and once."""

from __future__ import annotations

import asyncio
import dataclasses
import gc
import threading
import weakref

import pytest

from sao_jax.gateway.exchange import Answer, ChatRequest, CompletionRequest, RequestRefused
from sao_jax.gateway.sessions import End, Session

LONG = 30.0  # seconds that no test takes


def request(text: str) -> ChatRequest:
  return ChatRequest(messages=({"role": "user", "content": text},))


def answer(text: str) -> Answer:
  return Answer(content=text, finish_reason="stop")


def text_of(pending) -> str:
  return pending.request.messages[0]["content"]


async def settle() -> None:
  for _ in range(5):
    await asyncio.sleep(0)


def test_requests_are_taken_up_in_order_and_get_their_own_answers():
  async def play():
    session = Session({})
    asked = [asyncio.ensure_future(session.chat(request(text))) for text in "abc"]
    await settle()
    for expected in "abc":
      pending = await session.next(LONG)
      assert text_of(pending) == expected
      pending.answer(answer(expected.upper()))
    assert [(await task).content for task in asked] == ["A", "B", "C"]
    assert (session.requests, session.unread) == (3, 0)

  asyncio.run(play())


def test_a_request_whose_client_is_gone_before_its_turn_is_forgotten():
  async def play():
    session = Session({})
    first, second = (asyncio.ensure_future(session.chat(request(text))) for text in "ab")
    await settle()
    first.cancel()
    await settle()
    assert text_of(await session.next(LONG)) == "b"
    second.cancel()

  asyncio.run(play())


@pytest.mark.parametrize("early", [True, False])
def test_a_client_that_comes_back_gets_the_one_answer(early):  # before it was sampled, or after
  async def play():
    session = Session({})
    lost = asyncio.ensure_future(session.chat(request("a")))
    await settle()
    pending = await session.next(LONG)
    lost.cancel()
    await settle()
    if not early:
      pending.answer(answer("A"))
    again = asyncio.ensure_future(session.chat(request("a")))
    await settle()
    pending.answer(answer("A"))
    assert (await again).content == "A"

    # Nothing waits to be sampled; once the answer was read, the same request is a new one.
    with pytest.raises(TimeoutError):
      await session.next(0.01)
    further = asyncio.ensure_future(session.chat(request("a")))
    assert await session.next(LONG) is not pending
    further.cancel()
    assert (session.requests, session.unread) == (2, 0)

  asyncio.run(play())


def test_a_client_that_tries_again_gets_the_answer_that_was_written_to_nobody():
  async def play():
    session, again = Session({}), again_of("a")
    first = asyncio.ensure_future(session.chat(request("a")))
    pending = await session.next(LONG)
    early = asyncio.ensure_future(session.chat(again))  # before it is known here that the first client has gone
    await settle()
    pending.answer(answer("A"))
    assert {(await turn).content for turn in (first, early, asyncio.ensure_future(session.chat(again)))} == {"A"}
    assert (session.requests, session.repeated) == (1, 0)

    # Also one that was not taken up yet.
    first, again = (asyncio.ensure_future(session.chat(turn)) for turn in (request("b"), again_of("b")))
    (await session.next(LONG)).answer(answer("B"))
    assert (await first).content == (await again).content == "B" and session.requests == 2

    # Whoever does not say so has asked twice.
    anew = asyncio.ensure_future(session.chat(request("b")))
    (await session.next(LONG)).answer(answer("C"))
    assert (await anew).content == "C" and (session.requests, session.repeated) == (3, 1)

  asyncio.run(play())


def again_of(text):
  return dataclasses.replace(request(text), retried=True)


def test_an_answer_that_nobody_came_back_for_is_counted():
  async def play():
    session = Session({})
    lost = asyncio.ensure_future(session.chat(request("a")))
    pending = await session.next(LONG)
    lost.cancel()
    await settle()
    pending.answer(answer("A"))
    other = asyncio.ensure_future(session.chat(request("b")))
    assert text_of(await session.next(LONG)) == "b"
    other.cancel()
    assert session.unread == 1

  asyncio.run(play())


def test_a_reward_ends_everything_else():
  async def play():
    session = Session({})
    under_way, queued = (asyncio.ensure_future(session.chat(request(text))) for text in "ab")
    pending = await session.next(LONG)
    session.give_reward(0.5)
    with pytest.raises(RequestRefused) as refused:
      await queued
    assert (refused.value.status, refused.value.code) == (401, "session_closed")
    with pytest.raises(RequestRefused):
      await session.chat(request("c"))

    # The turn under way is still answered; the end comes behind it, and once.
    pending.answer(answer("A"))
    assert (await under_way).content == "A"
    assert await session.next(LONG) == End(0.5)
    with pytest.raises(RequestRefused) as refused:
      session.give_reward(1.0)
    assert refused.value.status == 409 and "it has its reward" in refused.value.message
    session.finish(2.0)
    assert await session.ended(LONG) == End(0.5)

  asyncio.run(play())


def test_a_closed_session_refuses_whoever_waits_and_whoever_comes():
  async def play():
    session = Session({"secret": 1})
    asked = [asyncio.ensure_future(session.chat(request(text))) for text in "ab"]
    await session.next(LONG)
    assert session.close("the run has ended") and not session.close("again")
    for task in asked:
      with pytest.raises(RequestRefused, match="the run has ended"):
        await task
    with pytest.raises(RequestRefused):
      await session.chat(request("c"))
    with pytest.raises(RequestRefused) as refused:
      session.give_reward(1.0)
    assert refused.value.status == 409 and session.data == {}

  asyncio.run(play())


def test_a_closed_session_keeps_nothing_that_was_said_in_it():
  async def play():
    session, said = Session({}), [request(text) for text in "abcd"]
    asked = [asyncio.ensure_future(session.chat(each)) for each in said[:2]]
    await session.next(LONG)
    session.close("the run has ended")
    for chat in (*asked, *map(session.chat, said[2:])):
      with pytest.raises(RequestRefused):
        await chat
    return session, [weakref.ref(each) for each in said]

  session, said = asyncio.run(play())
  gc.collect()
  assert session.state == "the run has ended" and [each() for each in said] == [None] * 4


def test_a_cut_session_refuses_requests_but_takes_its_reward():
  async def play():
    session = Session({})
    asked = asyncio.ensure_future(session.chat(request("a")))
    await session.next(LONG)
    session.refuse(RequestRefused(400, "too long", code="context_length_exceeded"))
    for chat in (asked, session.chat(request("b"))):
      with pytest.raises(RequestRefused, match="too long"):
        await chat
    session.give_reward(0.25)
    assert await session.ended(LONG) == End(0.25)

  asyncio.run(play())


def test_it_works_between_event_loops_in_several_threads():
  session, said = Session({}), []

  async def ask(number):
    for turn in range(5):
      reply = await session.chat(request(f"{number}.{turn}"))
      said.append((f"{number}.{turn}", reply.content))

  async def play():
    while isinstance(pending := await session.next(LONG), End) is False:
      pending.answer(answer(text_of(pending)))
    return pending

  threads = [threading.Thread(target=lambda i=i: asyncio.run(ask(i))) for i in range(4)]
  for thread in threads:
    thread.start()
  waiter = threading.Thread(target=lambda: [thread.join() for thread in threads] and session.finish(1.0))
  waiter.start()
  assert asyncio.run(play()) == End(1.0)
  assert len(said) == session.requests == 20 and all(text == reply for text, reply in said)


def test_waiting_ends_with_the_time():
  async def play():
    session = Session({})
    for wait in (session.next, session.ended, session.claimed):
      with pytest.raises(TimeoutError):
        await wait(0.01)

  asyncio.run(play())


def test_texts_without_turns_are_refused():
  with pytest.raises(RequestRefused, match="chat completions only"):
    asyncio.run(Session({}).complete(CompletionRequest(prompt="a")))

"""What sort of call each one is: by the harness's own signs where there are any, else by structure (C06)."""

from polar.engines.scripted import Scripted, ScriptedCall
from polar.specs import HarnessProfile, KindRule
from tests.gateway.conftest import Serve, Stand
from tests.gateway.conversation import Conversation, call_text

SUMMARY = "They wrote a file called hello.txt and then they read it again."


def policy(call: ScriptedCall) -> Scripted:
    """A summary for those who ask for one, else two commands and an answer."""
    if "Summarise" in call.prompt_text:
        return Scripted(SUMMARY)
    return Scripted(call_text(f"step {call.turn}") if call.turn < 2 else "Done.")


def system(text: str, user: str = "Do it.") -> list[dict[str, str]]:
    return [{"role": "system", "content": text}, {"role": "user", "content": user}]


async def kinds(stand: Stand, session_id: str) -> list[str]:
    return [call.kind for call in (await stand.captured(session_id)).calls]


async def test_without_rules_structure_tells_side_calls_and_sub_agents(serve: Serve) -> None:
    async with serve(policy) as stand:
        session_id, key = await stand.open()
        agent = Conversation(stand.client(key), system("You are the agent."))
        await agent.ask()
        child = Conversation(stand.client(key), system("You are a helper."))
        await child.ask()
        await agent.ask()
        await child.ask()
        await Conversation(stand.client(key), system("Name this chat."), tools=None).ask()
        assert await kinds(stand, session_id) == ["agent", "subagent", "agent", "subagent", "auxiliary"]


async def test_an_agent_without_tools_is_an_agent(serve: Serve) -> None:
    async with serve(lambda call: Scripted("Words.")) as stand:
        session_id, key = await stand.open()
        agent = Conversation(stand.client(key), system("You edit files."), tools=None)
        await agent.ask()
        agent.messages.append({"role": "user", "content": "Go on."})
        await agent.ask()
        assert await kinds(stand, session_id) == ["agent", "agent"]


async def test_an_agent_that_loses_its_tools_in_mid_history_is_still_the_agent(serve: Serve) -> None:
    async with serve(policy) as stand:
        session_id, key = await stand.open()
        agent = Conversation(stand.client(key), system("You are the agent."))
        await agent.ask()
        agent.tools = None
        await agent.ask()
        assert await kinds(stand, session_id) == ["agent", "agent"]


async def test_an_agent_that_is_told_to_use_no_tools_is_still_the_agent(serve: Serve) -> None:
    async with serve(lambda call: Scripted("Words.")) as stand:
        session_id, key = await stand.open()
        agent = Conversation(stand.client(key), system("You are the agent."))
        await agent.ask()
        agent.messages.append({"role": "user", "content": "Go on."})
        await agent.ask(tool_choice="none")
        assert await kinds(stand, session_id) == ["agent", "agent"]


async def test_a_title_that_comes_first_makes_no_sub_agent_of_the_agent(serve: Serve) -> None:
    async with serve(policy) as stand:
        session_id, key = await stand.open()
        await Conversation(stand.client(key), system("Name this chat."), tools=None).ask()
        await Conversation(stand.client(key), system("You are the agent.")).ask()
        assert (await kinds(stand, session_id))[1] == "agent"


async def test_a_header_of_the_harness_names_the_kind(serve: Serve) -> None:
    profile = HarnessProfile("codex", kinds=(KindRule("subagent", header="x-openai-subagent"),))
    async with serve(policy) as stand:
        session_id, key = await stand.open(profile)
        agent = Conversation(stand.client(key), system("You are the agent."))
        await agent.ask(extra_headers={"X-OpenAI-Subagent": "collab_spawn"})
        await Conversation(stand.client(key), system("You are the agent.", "Something else."), tools=None).ask()
        calls = (await stand.captured(session_id)).calls
        assert [call.kind for call in calls] == ["subagent", "agent"]
        assert calls[0].headers["x-openai-subagent"] == "collab_spawn"


async def test_after_a_compaction_the_agent_goes_on_from_the_summary(serve: Serve) -> None:
    profile = HarnessProfile("any", kinds=(KindRule("compaction", last="^Summarise"),))
    async with serve(policy) as stand:
        session_id, key = await stand.open(profile)
        agent = Conversation(stand.client(key), system("You are the agent."))
        await agent.ask()
        agent.messages.append({"role": "user", "content": "Summarise all that happened."})
        said = await agent.ask()
        agent.messages = system("You are the agent.", f"What happened so far:\n{said['content']}\nGo on.")
        await agent.ask()
        first, compaction, after = (await stand.captured(session_id)).calls
        assert [first.kind, compaction.kind, after.kind] == ["agent", "compaction", "agent"]
        assert (first.derived_from, compaction.derived_from, after.derived_from) == ("", "", compaction.call_id)
        assert after.parent_call == ""


async def test_an_agent_that_goes_on_in_a_history_with_a_compaction_is_still_the_agent(serve: Serve) -> None:
    profile = HarnessProfile("any", kinds=(KindRule("compaction", last="^Summarise"),))
    async with serve(policy) as stand:
        session_id, key = await stand.open(profile)
        agent = Conversation(stand.client(key), system("You are the agent."))
        await agent.ask()
        agent.messages.append({"role": "user", "content": "Summarise all that happened."})
        await agent.ask()
        agent.messages.append({"role": "user", "content": "Go on."})
        await agent.ask()
        assert await kinds(stand, session_id) == ["agent", "compaction", "agent"]


async def test_a_tool_that_prints_the_phrase_of_a_rule_changes_no_kind(serve: Serve) -> None:
    profile = HarnessProfile("any", kinds=(KindRule("compaction", last="result of call_"),))
    async with serve(policy) as stand:
        session_id, key = await stand.open(profile)
        agent = Conversation(stand.client(key), system("You are the agent."))
        await agent.ask()
        await agent.ask()
        assert await kinds(stand, session_id) == ["agent", "agent"]


async def test_kinds_survive_a_restart(serve: Serve) -> None:
    async with serve(policy) as stand:
        session_id, key = await stand.open()
        agent = Conversation(stand.client(key), system("You are the agent."))
        await agent.ask()
        path = agent.client.base_url.path
    async with serve(policy) as stand:
        agent.client = stand.client(key)
        assert agent.client.base_url.path == path
        await agent.ask()
        await Conversation(stand.client(key), system("You are a helper.")).ask()
        assert await kinds(stand, session_id) == ["agent", "agent", "subagent"]

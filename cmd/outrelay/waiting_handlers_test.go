package main

import (
	"strings"
	"testing"

	"github.com/outrelay/outrelay/internal/lab/devstack/stacktest"
	"github.com/outrelay/outrelay/internal/operate/admin"
	"github.com/outrelay/outrelay/pkg/consumer/deadletter"
)

func TestMessagesThatHandlersRetryAreListedRetriedAndDiscarded(t *testing.T) {
	t.Parallel()
	c := newClinic(t)
	if text := c.runCommand(0, nil, "waiting", "list", "--source", "handler"); text != "no message of a handler waits; searched databases of services: "+c.outbox.Database().Name()+"\n" {
		t.Errorf("before the first failure:\n%s", text)
	}

	c.publish("OrderPlaced", "late 1", "late 2", "good")
	c.untilHandled("report late 1", "report late 2", "report good", "invoice good")
	var page admin.Page[admin.HandlerMessage]
	stacktest.Eventually(t, "two messages that wait", func() bool {
		page = admin.Page[admin.HandlerMessage]{}
		c.runCommand(0, &page, "waiting", "list", "--source", "handler")
		return page.Total == 2
	})
	for _, m := range page.Items {
		if m.Group != c.group || m.Handler != "invoice" || m.Topic != c.topic || m.Type != "OrderPlaced" || m.ID != m.Key || m.Attempts != 1 || m.Reason != "no response" || m.NextAt == nil {
			t.Errorf("unexpected message %+v", m)
		}
	}
	if text := c.runCommand(0, nil, "waiting", "list", "--source", "handler", "--limit", "1"); !strings.Contains(text, "no response") || !strings.Contains(text, "1 of 2 messages") || !strings.Contains(text, "--after ") {
		t.Errorf("unexpected output:\n%s", text)
	}
	if text := c.runCommand(0, nil, "waiting", "summary", "--source", "handler"); !strings.Contains(text, "invoice") || !strings.Contains(text, c.group) {
		t.Errorf("unexpected output:\n%s", text)
	}
	if text := c.runCommand(0, nil, "status"); !strings.Contains(text, "handlers retry 2 messages: outrelay waiting list --source handler") {
		t.Errorf("status:\n%s", text)
	}

	// Each error is at the place of the mistake.
	for name, args := range map[string]struct{ line, want string }{
		"no selection":      {"retry --yes", "--handler"},
		"relay":             {"retry --source relay --all --yes", "outrelay failed retry"},
		"a flag of handler": {"list --group g", "add --source handler"},
		"a flag of relay":   {"list --source handler --reason parked", "--reason selects envelopes"},
		"another source":    {"list --source handlers", "expected relay or handler"},
		"an unknown id":     {"discard nothing --yes", "nothing matches no message that waits"},
		"a slash":           {"retry --handler g/invoice --yes", "separately"},
	} {
		if text := c.runCommand(exitConfig, nil, append([]string{"waiting"}, strings.Fields(args.line)...)...); !strings.Contains(text, args.want) {
			t.Errorf("%s: got %q, want %q in it", name, text, args.want)
		}
	}

	// The handler is repaired for one of them; an operator gives the other one up.
	text := c.runCommand(exitConfig, nil, "waiting", "retry", "late 2", "typo", "--yes")
	expectTexts(t, text, "typo matches no message that waits", "requested a retry of 1 message")
	if strings.Contains(text, "'late 2' matches") {
		t.Errorf("unexpected output:\n%s", text)
	}
	c.runCommand(0, nil, "waiting", "discard", "late 2", "--group", c.group, "--yes", "--actor", "ann")
	letters := c.untilLetters(1)
	if l := letters.Items[0]; l.ID != "late 2" || l.Class != deadletter.ClassSkipped || !strings.HasPrefix(l.Reason, "ann has discarded the message") {
		t.Errorf("unexpected letter %+v", l)
	}
	c.repaired.Store(true)
	if text := c.runCommand(0, nil, "waiting", "retry", "--handler", "invoice", "--yes"); !strings.HasPrefix(text, "requested a retry of 1 message") {
		t.Errorf("unexpected output:\n%s", text)
	}
	c.untilHandled("invoice late 1")
	c.runCommand(0, nil, "dead", "requeue", "late 2", "--source", "handler", "--yes")
	c.untilHandled("invoice late 2")
	if text := c.runCommand(0, nil, "audit"); !strings.Contains(text, "handler_retried") || !strings.Contains(text, "handler_discarded") {
		t.Errorf("audit log:\n%s", text)
	}
}

// A service that only consumes has no outbox in its database. consumers.databases names the database.
func TestCommandsReachAConsumerWithoutAnOutbox(t *testing.T) {
	t.Parallel()
	g := newGraveyard(t, 0)
	shipping := stacktest.Database(t, g.state.Client())
	c := newClinicIn(g, shipping)
	if text := c.runCommand(exitConfig, nil, "waiting", "list", "--source", "handler", "--database", shipping.Name()); !strings.Contains(text, "consumers.databases") {
		t.Errorf("the rejection does not name the key:\n%s", text)
	}

	c.env = append(c.env, "OUTRELAY_CONSUMERS_DATABASES="+shipping.Name())
	if text := c.runCommand(0, nil, "waiting", "list", "--source", "handler"); !strings.Contains(text, shipping.Name()) {
		t.Errorf("the empty list does not name the database:\n%s", text)
	}
	c.publish("OrderPlaced", "late 1", "bad 1")
	c.untilHandled("report late 1", "report bad 1")
	c.untilLetters(1)
	var page admin.Page[admin.HandlerMessage]
	stacktest.Eventually(t, "a message that waits", func() bool {
		c.runCommand(0, &page, "waiting", "list", "--source", "handler")
		return page.Total == 1
	})
	if text := c.runCommand(0, nil, "status"); !strings.Contains(text, "handlers retry 1 message") || !strings.Contains(text, "of handlers") {
		t.Errorf("status:\n%s", text)
	}
	if text := c.runCommand(0, nil, "lookup", "late 1"); !strings.Contains(text, "handler      invoice of group ") {
		t.Errorf("lookup:\n%s", text)
	}

	c.repaired.Store(true)
	c.runCommand(0, nil, "waiting", "retry", "--handler", "invoice", "--yes")
	c.untilHandled("invoice late 1")
}

package e2e

import (
	"context"
	"errors"
	"slices"
	"strings"
	"time"

	"github.com/chromedp/chromedp"
	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo/options"

	"github.com/outrelay/outrelay/internal/base/module"
	"github.com/outrelay/outrelay/internal/service/setaside"
	"github.com/outrelay/outrelay/pkg/consumer/deadletter"
	"github.com/outrelay/outrelay/pkg/event"
)

// messageBody is the value of each message.
const messageBody = "note: " + hostile

// giveUp stores messages that a handler of the group billing has given up.
func (s *scene) giveUp(handler string, messages ...string) {
	s.t.Helper()
	desk, err := deadletter.New(s.db)
	if err != nil {
		s.t.Fatal(err)
	}
	if err := desk.EnsureIndexes(s.t.Context(), module.Key{}); err != nil {
		s.t.Fatal(err)
	}

	for offset, id := range messages {
		l := &deadletter.Letter{
			ID:    deadletter.ID{Group: "billing", Handler: handler, Topic: s.topic, Offset: int64(offset), Message: id},
			Class: deadletter.ClassHandler, Reason: "no response " + hostile,
			Name: "OrderPlaced", Key: []byte("7"), Value: []byte(messageBody),
			Headers: []event.Header{{Key: "id", Value: []byte(id)}},
		}
		omitted, err := desk.Put(s.t.Context(), module.Key{}, l, func(context.Context, string) error { return nil })
		if err := errors.Join(omitted, err); err != nil {
			s.t.Fatal(err)
		}
	}
}

// waitingMessage is a message that waits for its handler.
type waitingMessage struct {
	Handler string `bson:"h"`
	Value   string `bson:"v"`
}

// waitingMessages returns the messages that wait, in the order of their values.
func (s *scene) waitingMessages() (list []waitingMessage) {
	s.t.Helper()
	cur, err := s.db.Collection(setaside.DefaultCollection).Find(s.t.Context(), bson.D{}, options.Find().SetSort(bson.D{{Key: "v", Value: 1}}))
	if err != nil {
		s.t.Fatal(err)
	}

	var docs []struct {
		Handler string `bson:"h"`
		Value   []byte `bson:"v"`
	}

	if err := cur.All(s.t.Context(), &docs); err != nil {
		s.t.Fatal(err)
	}

	for _, d := range docs {
		list = append(list, waitingMessage{d.Handler, string(d.Value)})
	}

	return list
}

// testHandlerLetters edits, requeues and discards letters of handlers: an edited or requeued message waits for its handler.
func testHandlerLetters(s *scene, b *tab) {
	s.giveUp("charge", "m-1", "m-2")
	s.giveUp("ship", "m-1", "m-3", "m-4")
	b.openPage("/dead")
	b.runActions("the letters of handlers", chromedp.SetValue(`select[name=source]`, "handler"))
	b.clickButton("Filter")
	b.waitForText("5 in all")
	b.waitUntil("the name of the handler", `document.body.textContent.includes("billing/charge")`)
	if evaluateScript[int](b, "document.images.length") != 0 {
		b.t.Error("text of an error became an element")
	}
	for _, width := range []int64{360, 1280} {
		b.setWindowSize(width, 900)
		if over := evaluateScript[int](b, "document.documentElement.scrollWidth - document.documentElement.clientWidth"); over > 0 {
			b.t.Errorf("the letters of handlers scroll sideways by %d px at %d px", over, width)
		}
	}
	b.checkAccessibility("letters of handlers")
	b.takeScreenshot("dead-handlers")

	// One letter is edited.
	b.openPage("/dead?source=handler&handler=charge&id=m-1")
	b.runActions("the letter", chromedp.Click(`tbody tr:nth-child(1) th a`))
	b.waitForText("Edit and requeue")
	if strings.Contains(evaluateScript[string](b, "document.querySelector('pre').innerText"), "onerror") {
		b.t.Error("the payload is shown without a request for it")
	}
	b.checkAccessibility("letter of a handler")
	b.clickButton("Edit and requeue")
	// Editing the text ticks the box "Replace the payload".
	b.runActions("a new payload", chromedp.SendKeys(`textarea[name=payload]`, "edited"))
	b.clickButton("Requeue as edited …")
	b.waitForText("Changed: payload")
	b.confirmAction("Message m-1 goes back to its handler at once", "Requeue as edited", "was requeued; changed: payload")

	// The rest of its handler is requeued, and the message of another handler with the same id stays.
	b.openPage("/dead?source=handler&handler=charge")
	b.waitForText("1 in all")
	b.runActions("all that match", chromedp.Click(`input[name=scope][value=all]`))
	b.clickButton("Requeue …")
	b.confirmAction("1 message is handed back to the handlers", "Requeue 1", "1 dead letter requeued")
	want := []waitingMessage{{"billing/charge", "edited"}, {"billing/charge", messageBody}}
	if got := s.waitingMessages(); !slices.Equal(got, want) {
		b.t.Errorf("%v wait, want %v", got, want)
	}

	b.openPage("/dead?source=handler&handler=ship")
	b.waitForText("3 in all")
	b.runActions("one is ticked", chromedp.Click(`input[name=pick][aria-label="Select m-4"]`))
	b.clickButton("Discard …")
	b.confirmAction("1 dead letter is moved into the archive", "Discard 1", "1 dead letter discarded")
	if n := s.countDocuments(deadletter.DefaultCollection, bson.D{{Key: "archived", Value: nil}}); n != 4 {
		b.t.Errorf("%d letters are left, want 4", n)
	}

	// It can be seen in the archive, and goes from there for good.
	b.runActions("the archive", chromedp.SetValue(`select[name=requeued]`, "archived"))
	b.clickButton("Filter")
	b.waitForText("discarded by")
	b.checkAccessibility("the archive")
	b.runActions("its letter", chromedp.Click(`input[name=pick][aria-label="Select m-4"]`))
	b.clickButton("Remove for good …")
	b.confirmAction("1 dead letter is removed for good", "Discard 1", "1 dead letter discarded")
	if n := s.countDocuments(deadletter.DefaultCollection, bson.D{}); n != 4 {
		b.t.Errorf("%d letters are left with the archive, want 4", n)
	}
	b.checkConsole("letters of handlers")
}

// testHandlerWaiting retries the messages that wait for their handler, and discards one. No member of the group runs, so both stay
// requests.
func testHandlerWaiting(s *scene, b *tab) {
	// A consumer creates the index.
	if err := setaside.New(s.db, setaside.DefaultCollection).EnsureIndexes(s.t.Context()); err != nil {
		b.t.Fatal(err)
	}
	waiting := s.db.Collection(setaside.DefaultCollection)
	failed := bson.D{{Key: "n", Value: 3}, {Key: "since", Value: time.Now().Add(-time.Hour)}, {Key: "due", Value: time.Now().Add(time.Hour)}}
	if _, err := waiting.UpdateMany(s.t.Context(), bson.D{}, bson.D{{Key: "$set", Value: failed}}); err != nil {
		b.t.Fatal(err)
	}
	countMarked := func(field string) int64 {
		return s.countIn(waiting, bson.D{{Key: field, Value: bson.D{{Key: "$type", Value: bson.A{"date", "object"}}}}})
	}

	b.openPage("/waiting")
	b.clickButton("Messages of handlers")
	b.waitForText("2 in all")
	b.waitUntil("the name of the handler", `document.body.textContent.includes("billing/charge")`)
	b.setWindowSize(360, 900)
	b.checkAccessibility("messages of handlers on a phone")
	b.setWindowSize(1280, 900)
	b.checkAccessibility("messages of handlers")
	b.takeScreenshot("handlers")

	b.runActions("all that match", chromedp.Click(`input[name=scope][value=all]`))
	b.clickButton("Retry now …")
	b.confirmAction("2 messages are tried again at once", "Retry now 2", "tried again now")
	if n := countMarked("rq"); n != 2 {
		b.t.Errorf("%d messages have a request, want 2", n)
	}

	b.waitForText("requested")
	b.runActions("a message", chromedp.Click(`tbody tr:last-child input[name=pick]`))
	b.waitForText("1 selected")
	b.clickButton("Discard …")
	b.confirmAction("1 message is discarded", "Discard 1", "1 message is discarded")
	if n := countMarked("dc"); n != 1 {
		b.t.Errorf("%d messages are discarded, want 1", n)
	}
	b.waitForText("is discarded")
	b.checkConsole("messages of handlers")
}

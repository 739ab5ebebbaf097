package opspage

import (
	"fmt"
	"strconv"

	"github.com/outrelay/outrelay/internal/operate/admin"
)

// parseTopicOrder returns the topic of the form, and its numbers if the form has them.
func (c *call) parseTopicOrder() (admin.TopicOrder, error) {
	order := admin.TopicOrder{Topic: c.value("topic")}
	if order.Topic == "" {
		return order, invalidInput("the request names no topic")
	}
	for name, number := range map[string]*int{"partitions": &order.Partitions, "replication": &order.Replication} {
		text := c.value(name)
		if text == "" {
			continue
		}
		n, err := strconv.Atoi(text)
		if err != nil || n < 1 {
			return order, invalidInput("%s: %q is not a number above 0; leave it empty to use topics.create or the default of the brokers", name, text)
		}
		*number = n
	}
	return order, nil
}

func planTopicCreate(call *call) (preview, error) {
	order, err := call.parseTopicOrder()
	if err != nil {
		return preview{}, err
	}
	// A broker checks the rights and the settings before anybody confirms.
	order.DryRun = true
	found, err := call.use.Activity.CreateTopic(call.ctx, order)
	run := func() (notice, error) {
		order.DryRun = false
		created, err := call.use.Activity.CreateTopic(call.ctx, order)
		return notice{Text: describeCreated(created) + ".", Final: "Its waiting events are sent within about a second."}, err
	}

	preview := newPreview(run, "The page cannot delete a topic.", describeCreated(found)+" in Kafka.")
	preview.Rows = []row{
		{"Partitions", orBrokers(found.Partitions)},
		{"Replication factor", orBrokers(found.Replication)},
		{"The same by Kafka's tool", found.Command},
	}
	return preview, err
}

// describeCreated returns the effect on a topic, without the end of the sentence.
func describeCreated(topic admin.TopicCreated) string {
	if topic.Extended {
		return "Topic " + topic.Topic + " exists, and gets the missing partitions"
	}
	return "Topic " + topic.Topic + " is created"
}

// orBrokers returns a number of a new topic, or who chooses it.
func orBrokers(n int) string {
	if n == 0 {
		return "the default of the brokers"
	}
	return strconv.Itoa(n)
}

func planSkip(call *call) (preview, error) {
	order := admin.SkipOrder{Collection: call.value("collection"), ID: call.q.Get("id"), DryRun: true}
	found, err := call.use.Recovery.PassOver(call.ctx, order)
	if err != nil {
		return preview{}, err
	}
	// The confirmed event is passed over, and not a later one.
	call.q.Set("collection", found.Collection)
	call.q.Set("id", found.ID)
	order = admin.SkipOrder{Collection: found.Collection, ID: found.ID}
	run := func() (notice, error) {
		skipped, err := call.use.Recovery.PassOver(call.ctx, order)
		return notice{
			Text: "The next owner passes over event " + skipped.ID + " of " + skipped.Collection + ".", Final: "Its dead letter is " + skipped.Letter + ".",
		}, err
	}

	size := "Its document does not exist any more, so the dead letter has only the id."
	if found.Bytes > 0 {
		size = fmt.Sprintf("The dead letter gets its envelope of %s.", countNoun(int64(found.Bytes), "byte"))
	}
	return newPreview(run, "The dead letter can be requeued.",
		"Event "+found.ID+" of "+found.Collection+" becomes a dead letter of class skipped, and is not sent. "+size,
		"The owner steps down, and the next one continues after the event."), nil
}

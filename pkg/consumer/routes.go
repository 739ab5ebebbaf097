package consumer

import (
	"context"
	"errors"
	"fmt"

	"github.com/outrelay/outrelay/internal/glob"
)

// Route assigns a Publisher to the topics that match a pattern.
type Route struct {
	Pattern   string // as of Handle: "commands.*", "*"
	Publisher Publisher
}

// Routes is a Publisher that passes messages to other Publishers, by the name of the topic. The
// first matching route is used. For example, commands can stay in memory while events go to Kafka.
// If no route matches, Publish returns an *UnroutedError.
type Routes []Route

// UnroutedError reports that no route matches a topic.
type UnroutedError struct{ Topic string }

func (e *UnroutedError) Error() string { return fmt.Sprintf("no route for topic %q", e.Topic) }

// Publish calls the Publisher of the first route that matches the topic.
func (r Routes) Publish(ctx context.Context, topic string, ms []*Message) error {
	for _, route := range r {
		if !glob.Match(route.Pattern, topic) {
			continue
		}
		if route.Publisher == nil {
			return errors.New("consumer: the publisher of route " + route.Pattern + " is nil")
		}
		return route.Publisher.Publish(ctx, topic, ms)
	}
	return &UnroutedError{topic}
}

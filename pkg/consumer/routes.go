package consumer

import (
	"context"
	"errors"
	"fmt"

	"github.com/outrelay/outrelay/internal/glob"
)

// Route says which Publisher topics of a pattern go to.
type Route struct {
	Pattern   string // as of Handle: "commands.*", "*"
	Publisher Publisher
}

// Routes is a Publisher that hands on to others, by the topic's name: the first that matches has it. So commands may stay
// in memory while events go to Kafka. For one that no route takes Publish returns an *UnroutedError.
type Routes []Route

// UnroutedError says that no route takes a topic.
type UnroutedError struct{ Topic string }

func (e *UnroutedError) Error() string { return fmt.Sprintf("no route for topic %q", e.Topic) }

// Publish hands on to the Publisher of the topic.
func (r Routes) Publish(ctx context.Context, topic string, ms []*Message) error {
	for _, x := range r {
		if glob.Match(x.Pattern, topic) {
			if x.Publisher == nil {
				return errors.New("consumer: the publisher of route " + x.Pattern + " is nil")
			}
			return x.Publisher.Publish(ctx, topic, ms)
		}
	}
	return &UnroutedError{topic}
}

package devstack

import (
	"context"
	"errors"
	"fmt"

	"github.com/segmentio/kafka-go"
)

// DeleteTopics deletes topics with their records. It ignores missing topics. If a broker has not found its
// controller, DeleteTopics retries until ctx ends.
func (s *Stack) DeleteTopics(ctx context.Context, names ...string) error {
	if len(names) == 0 {
		return nil
	}

	cl, done := newClient(s.Brokers())
	defer done()

	var res *kafka.DeleteTopicsResponse
	err := retryWhile(ctx, func() (err error) {
		res, err = cl.DeleteTopics(ctx, &kafka.DeleteTopicsRequest{Topics: names})
		return err
	}, isAway)
	if err != nil {
		return fmt.Errorf("deleting topics: %w", err)
	}

	var errs []error
	for name, err := range res.Errors {
		// A missing topic is the result that the caller wants.
		if err != nil && !errors.Is(err, kafka.UnknownTopicOrPartition) {
			errs = append(errs, fmt.Errorf("deleting topic %s: %w", name, err))
		}
	}
	return errors.Join(errs...)
}

package connect

import (
	"fmt"
	"strings"
	"testing"

	"github.com/outrelay/outrelay/internal/kafkawire"
)

// Before the first group of a cluster, Kafka has no coordinator. That is no error of the user.
func TestAMissingCoordinatorIsDescribedInPlainWords(t *testing.T) {
	t.Parallel()
	text := describeGroupProblem("office", "find", fmt.Errorf("finding the coordinator of office: %w", kafkawire.CoordinatorNotAvailable))
	if !strings.Contains(text, "Kafka has no coordinator") || !strings.Contains(text, "office") || strings.Contains(text, "[15]") {
		t.Error(text)
	}
}

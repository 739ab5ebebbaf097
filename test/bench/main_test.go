//go:build unix

package bench

import (
	"testing"

	"github.com/outrelay/outrelay/test/kit"
)

func TestMain(m *testing.M) { kit.Main(m) }

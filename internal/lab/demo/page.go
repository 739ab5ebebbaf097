package demo

import (
	"context"
	"fmt"
	"log/slog"
	"sync"

	"github.com/outrelay/outrelay/internal/contract/config"
	"github.com/outrelay/outrelay/internal/operate/operators"
)

// servePage serves the operator's page until ctx ends. It runs in this process, so that its address
// stays the same when a relay is killed. Anyone with access to the loopback address may act: the
// servers exist only for this run.
func (d *demo) servePage(ctx context.Context, wg *sync.WaitGroup) error {
	settings := append(d.options.Settings[:len(d.options.Settings):len(d.options.Settings)],
		"node=dev", "http.admin.listen=127.0.0.1:0", "http.admin.anonymous=operator")
	cfg, _, err := config.Load(d.relays.config, nil, settings)
	if err != nil {
		return fmt.Errorf("configuring the operator's page: %w", err)
	}
	//nolint:contextcheck // it disconnects after the end of ctx
	server, err := operators.New(cfg, "dev", slog.New(slog.DiscardHandler), nil)
	if err != nil {
		return err
	}

	// The error is ignored: the page ends with the demo, and a user notices if it ends earlier.
	wg.Go(func() { _ = server.Run(ctx) })
	d.view.printLine("  page              http://%s", server.Addr())
	return nil
}

package demo

import (
	"context"
	"fmt"
	"log/slog"
	"sync"

	"github.com/outrelay/outrelay/internal/app"
	"github.com/outrelay/outrelay/internal/config"
)

// page serves the operator's page from this process, so that it stays where it is when a relay is killed. Whoever reaches
// this machine's own address may act: the servers behind it are there for this run alone. It ends with ctx.
func (d *demo) page(ctx context.Context, wg *sync.WaitGroup) error {
	cfg, _, err := config.Load(d.relays.config, nil, []string{"node=dev", "http.admin.listen=127.0.0.1:0", "http.admin.anonymous=operator"})
	if err != nil {
		return fmt.Errorf("configuring the operator's page: %w", err)
	}
	o, err := app.NewOperators(cfg, "dev", slog.New(slog.DiscardHandler)) //nolint:contextcheck // it disconnects after the end of ctx
	if err != nil {
		return err
	}
	wg.Go(func() { _ = o.Run(ctx) }) // it ends when the demo does; until then a page that is gone shows by itself
	d.v.line("  page              http://%s", o.Addr())
	return nil
}

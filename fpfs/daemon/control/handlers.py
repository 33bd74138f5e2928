"""What ``fpfs-ctl`` asks of a server: figures, waiting until things are durable, renewal, scrub.

Concurrency: trio thread only; requests overlap.
"""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import msgspec

import fpfs
from fpfs.core.errors import NotPermitted
from fpfs.core.protocol.questions import (
    ApplyPolicies,
    AskStatus,
    ChangePolicy,
    CommitGroup,
    DescribeFiles,
    ExplainPolicy,
    FlushAll,
    ListPolicies,
    ListRuns,
    ListVersions,
    Question,
    RestartServer,
    RestoreVersion,
    ScrubNext,
    WaitDurable,
)
from fpfs.core.protocol.reports import (
    Failure,
    FilesShown,
    Flushed,
    RecoveryStatus,
    Renewing,
    Scrubbed,
    Status,
)
from fpfs.core.threads import run_alone
from fpfs.daemon.catalog.rows.groups import Uncommitted
from fpfs.daemon.catalog.rows.objects import held_by_device
from fpfs.daemon.catalog.rows.quarantine import QuarantinedSave, list_quarantined
from fpfs.daemon.catalog.rows.queries import may_list
from fpfs.daemon.control.coalesce import Paced
from fpfs.daemon.maintenance.scrub import Scrub
from fpfs.daemon.telemetry import status
from fpfs.daemon.telemetry.live import ActivityControl
from fpfs.daemon.telemetry.tracing import Tracing

if TYPE_CHECKING:
    from fpfs.core.engine import Engine
    from fpfs.core.options import ServerConfig
    from fpfs.core.protocol.questions import Handler
    from fpfs.core.protocol.reports import (
        PoliciesListed,
        PolicyExplained,
        PolicyShown,
        RunsShown,
        VersionsShown,
    )
    from fpfs.daemon.catalog.database import Catalog
    from fpfs.daemon.catalog.rows.queries import Asker
    from fpfs.daemon.commit.groups import Groups
    from fpfs.daemon.commit.pipeline import Commit
    from fpfs.daemon.commit.versions import Versions
    from fpfs.daemon.control.device_handlers import DeviceControl
    from fpfs.daemon.devices.keeper_link import KeeperLink
    from fpfs.daemon.inodes.policies import Policies
    from fpfs.daemon.names.namespace import Namespace

EXIT_RENEWED = 4
"""Exit status of a server that made room for another program."""

_log = logging.getLogger("fpfs.server")


class ControlledServer:
    """A server as the control protocol drives it (`fpfs.daemon.control.server.Controlled`)."""

    def __init__(
        self,
        *,
        config: ServerConfig,
        devices: DeviceControl,
        catalog: Catalog,
        engine: Engine,
        namespace: Namespace,
        commit: Commit,
        policies: Policies,
        versions: Versions,
        groups: Groups,
        link: KeeperLink,
        restarts: int,
        check_installed: Callable[[], str],
    ) -> None:
        """Keep the parts; none of them is closed here.

        `check_installed` returns the version of the program that is installed by now, if that can
        take over; it blocks, and raises `InvalidOperation` otherwise.
        """
        self._check_installed = check_installed
        self._config = config
        registry = self._registry = devices.registry
        self._catalog = catalog
        self._engine = engine
        self._namespace = namespace
        self._commit = commit
        self._policies = policies
        self._versions = versions
        self._groups = groups
        self._link = link
        self._restarts = restarts
        self._recovery = RecoveryStatus()
        self.tracing = Tracing(
            catalog=catalog,
            engine=engine,
            namespace=namespace,
            commit=commit,
            device_paths=lambda: registry.paths,
        )
        """Run by the server, beside what serves."""
        self._paced_status = Paced(self._status)
        self._handlers: Mapping[type[Question[Any]], Handler] = {
            AskStatus: self.status,
            WaitDurable: self.wait_durable,
            DescribeFiles: self.describe_files,
            ListRuns: self.list_runs,
            FlushAll: self.flush,
            RestartServer: self.prepare_renewal,
            ScrubNext: self.scrub,
            ChangePolicy: self.change_policy,
            ListPolicies: self.list_policies,
            ApplyPolicies: self.apply_policies,
            ExplainPolicy: self.explain_policy,
            ListVersions: self.list_versions,
            RestoreVersion: self.restore,
            CommitGroup: self.commit_group,
            **devices.handlers,
            **self.tracing.handlers,
            **self._activity_control().handlers,
        }
        self._scrub = Scrub(
            catalog=catalog,
            engine=engine,
            device_paths=lambda: registry.paths,
            missing=lambda: registry.missing,
        )

    def _activity_control(self) -> ActivityControl:
        return ActivityControl(
            mountpoint=self._config.mountpoint,
            started_unix_s=self._link.started_unix_s,
            restarts=self._restarts,
            registry=self._registry,
            catalog=self._catalog,
            engine=self._engine,
            namespace=self._namespace,
            commit=self._commit,
        )

    def recovered(self, recovery: RecoveryStatus) -> None:
        """Tell from now on what the server found and did when it began."""
        self._recovery = recovery

    def collected(self, objects_removed: int) -> None:
        """Tell how many objects of no version were removed in the background."""
        self._recovery = msgspec.structs.replace(self._recovery, objects_removed=objects_removed)

    @property
    def handlers(self) -> Mapping[type[Question[Any]], Handler]:
        """Who answers each question."""
        return self._handlers

    async def status(self, _question: AskStatus) -> Status:
        """Figures of now, for the control protocol."""
        return await self._paced_status.ask()

    async def _status(self) -> Status:
        self._namespace.catch_up()
        statistics = self._engine.statistics()
        copies = self._catalog.copies()
        members = self._registry.members
        held_bytes: Mapping[int, int] = {}
        try:
            held_bytes = await self._catalog.read(held_by_device)
        except OSError as error:
            # The devices' states are wanted most when the catalog cannot be read.
            _log.debug("what devices hold cannot be told: %s", error)
        devices = await run_alone(status.device_statuses, members, statistics, copies, held_bytes)
        catalog = await run_alone(status.catalog_status, copies)
        return Status(
            version=fpfs.__version__,
            server_pid=os.getpid(),
            keeper_pid=self._link.keeper_pid,
            restarts=self._restarts,
            filesystem_id=self._catalog.filesystem_id,
            mountpoint=self._config.mountpoint,
            started_unix_s=self._link.started_unix_s,
            ack=self._config.options.ack,
            chunk_bytes=self._config.options.chunk_bytes,
            depth=self._config.options.depth,
            log=self._config.log,
            devices=devices,
            staging=status.staging_status(statistics),
            commit=status.commit_status(self._commit.statistics()),
            quarantined=status.quarantined_status(await self._quarantined()),
            uncommitted=status.uncommitted_status(await self._uncommitted()),
            catalog=catalog,
            recovery=self._recovery,
            channel=status.channel_counters(statistics),
        )

    async def _quarantined(self) -> Sequence[QuarantinedSave]:
        """What killed writers left. A catalog that cannot be read does not keep the rest back."""
        try:
            return await self._catalog.read(list_quarantined)
        except OSError as error:
            _log.debug("what killed writers left cannot be told: %s", error)
            return ()

    async def _uncommitted(self) -> Sequence[Uncommitted]:
        """Groups that are not committed, told as `_quarantined` are."""
        try:
            return await self._groups.uncommitted()
        except OSError as error:
            _log.debug("groups that are not committed cannot be told: %s", error)
            return ()

    async def prepare_renewal(self, _question: RestartServer) -> Renewing:
        """Return when the installed program has said that it can take over. OSError otherwise."""
        return Renewing(version=await run_alone(self._check_installed))

    def renew(self) -> NoReturn:
        """End at once and leave everything to the program that is installed by now."""
        self._link.renewing()
        logging.shutdown()
        os._exit(EXIT_RENEWED)

    async def wait_durable(self, question: WaitDurable) -> Flushed:
        """Return when an inode's content and names are durable. OSError when they cannot be."""
        await self._namespace.catch_up_with_kernel()
        if question.below:
            failed = await self._commit.wait_durable_below(question.ino)
            return Flushed(failures=status.failures(failed))
        await self._commit.wait_durable(question.ino)
        return Flushed()

    async def describe_files(self, question: DescribeFiles) -> FilesShown:
        """Return what is known of inodes."""
        return await self._describe(question)

    async def _describe(
        self, question: DescribeFiles, *, seen_by: Asker | None = None
    ) -> FilesShown:
        await self._namespace.catch_up_with_kernel()
        return FilesShown(
            files=await self._namespace.statuses.describe(question.inos, seen_by=seen_by)
        )

    async def list_runs(self, question: ListRuns) -> RunsShown:
        """Return where some of a file lies."""
        return await self._namespace.statuses.list_runs(question.ino, segment=question.segment)

    async def _check_listable(self, directory: int, asker: Asker) -> None:
        """Refuse what somebody asks of a directory that he may not read and search."""
        if not await self._catalog.read(lambda t: may_list(t, directory, asker)):
            raise NotPermitted("this is not a directory that you may read and search")

    async def answer_other(self, question: Question[Any], asker: Asker) -> msgspec.Struct:
        """Answer somebody who is neither root nor the mount's owner: what the mount shows him."""
        match question:
            case DescribeFiles():
                return await self._describe(question, seen_by=asker)
            case WaitDurable() | ListRuns():
                if not await self._namespace.statuses.describe([question.ino], seen_by=asker):
                    raise NotPermitted("it is not in a directory that you may read and search")
            case ChangePolicy(ino=directory):
                await self._check_listable(directory, asker)
            case ExplainPolicy(directory=directory) | ListVersions(directory=directory):
                await self._check_listable(directory, asker)
        answer = await self._handlers[type(question)](question)
        if isinstance(answer, Status):
            return status.without_names(answer)
        return answer

    async def flush(self, _question: FlushAll) -> Flushed:
        """Return when everything is durable but for the failures in the answer."""
        await self._namespace.catch_up_with_kernel()
        failed = await self._commit.flush_all()
        return Flushed(failures=status.failures(failed))

    async def scrub(self, question: ScrubNext) -> Scrubbed:
        """Compare some committed contents with their checksums."""
        return await self._scrub.step(question.step, ino=question.ino)

    async def change_policy(self, question: ChangePolicy) -> PolicyShown:
        """Set and unset for a directory."""
        return await self._policies.change(question.ino, question.change)

    async def list_policies(self, question: ListPolicies) -> PoliciesListed:
        """Return what was set for a directory and for those below it."""
        return await self._policies.list_all(question.ino)

    async def apply_policies(self, question: ApplyPolicies) -> PoliciesListed:
        """Set and unset for several directories, all or none."""
        return await self._policies.apply(question.changes)

    async def explain_policy(self, question: ExplainPolicy) -> PolicyExplained:
        """Tell what holds for a name, and where its content lies."""
        return await self._policies.explain(question.directory, question.name)

    async def commit_group(self, question: CommitGroup) -> Flushed:
        """Commit a directory as a whole, durably. OSError when that cannot be."""
        await self._namespace.catch_up_with_kernel()
        await self._groups.commit(question.ino)
        return Flushed()

    async def list_versions(self, question: ListVersions) -> VersionsShown:
        """Return the former versions of a name."""
        return await self._versions.show(question.directory, question.name)

    async def restore(self, question: RestoreVersion) -> VersionsShown:
        """Make a former version the present one, durably. OSError when there is none."""
        await self._namespace.catch_up_with_kernel()
        await self._commit.wait_queued()
        shown = await self._versions.restore(
            question.directory, question.name, question.number, groups=self._groups
        )
        await self._catalog.make_durable()
        return shown

    async def flush_at_end(self) -> Flushed:
        """Flush; when the catalog itself is what failed, that is one of the failures.

        What somebody writes waits until it is certain that it cannot be finished.
        """
        try:
            self._namespace.catch_up()
            failed = await self._commit.flush_all(written_to=False)
        except OSError as error:
            reason = error.strerror or str(error)
            message = f"names and versions since the last flush may be lost: {reason}"
            _log.critical("%s", message)
            failures = status.failures(self._commit.statistics().failures)
            whole = Failure(ino=0, errno=error.errno or errno.EIO, message=message)
            return Flushed(failures=(*failures, whole))
        return Flushed(failures=status.failures(failed))

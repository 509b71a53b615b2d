"""Kernel sets that get one thing wrong each."""

import torch
from kvdock.kernels.reference import ReferenceKernels
from kvdock.testing.suites import KernelSuite


class ExtendsOneTooFar(ReferenceKernels):
    def alloc_extend(self, prefix_lens, seq_lens, last_loc, new_pages, page_size, extend_num_tokens):
        found = super().alloc_extend(prefix_lens, seq_lens, last_loc, new_pages, page_size, extend_num_tokens)
        if extend_num_tokens and int(seq_lens[-1]) % page_size == 0:
            found[-1] += 1
        return found


class ForgetsShortExtends(ReferenceKernels):
    """A-09: three slices, of which the first goes negative where a request stays inside its page."""

    def alloc_extend(self, prefix_lens, seq_lens, last_loc, new_pages, page_size, extend_num_tokens):
        found, pages = [], iter(new_pages.tolist())
        for prefix, seq, last in zip(prefix_lens.tolist(), seq_lens.tolist(), last_loc.tolist(), strict=True):
            head = -prefix % page_size
            found += range(last + 1, last + 1 + head)
            for start in range(prefix + head, seq, page_size):
                page = next(pages)
                found += range(page * page_size, page * page_size + min(page_size, seq - start))
        return torch.tensor(found[:extend_num_tokens], dtype=torch.int64)


class ExtendsIn32Bits(ReferenceKernels):
    def alloc_extend(self, *args):
        return super().alloc_extend(*args).to(torch.int32).to(torch.int64)


class AnswersIn32Bits(ReferenceKernels):
    def alloc_decode(self, *args):
        return super().alloc_decode(*args).to(torch.int32)


class TakesPagesInReverse(ReferenceKernels):
    def alloc_decode(self, seq_lens, last_loc, new_pages, page_size):
        return super().alloc_decode(seq_lens, last_loc, new_pages.flip(0), page_size)


class CountsBytesIn32Bits(ReferenceKernels):
    def store(self, view, loc, values):
        row = view.stride(1) if view.shape[1] > 1 else view.stride(0)
        super().store(view, ((loc * row).to(torch.int32) // row).to(torch.int64) % view.shape[:2].numel(), values)


class TakesPagesForContiguous(ReferenceKernels):
    def store(self, view, loc, values):
        super().store(view.as_strided(view.shape, torch.empty(view.shape, device="meta").stride()), loc, values)


class SwapsPagesAndPlaces(ReferenceKernels):
    def gather(self, view, loc):
        pages, size = view.shape[:2]
        swapped = torch.where(loc < size * min(pages, size), loc % size * size + loc // size, loc)
        return super().gather(view, swapped if pages >= size else loc)


class WritesPastTheEnd(ReferenceKernels):
    def store(self, view, loc, values):
        super().store(view, loc, values)
        if len(loc):
            row = view.stride(1)
            last = view.storage_offset() + (view.shape[0] - 1) * view.stride(0) + (view.shape[1] - 1) * row
            view.as_strided((1,), (1,), last + view.shape[2:].numel()).add_(1)


class LeavesTheTail(ReferenceKernels):
    """Writes vectors of four rows, and forgets what is left."""

    def store(self, view, loc, values):
        whole = len(loc) // 4 * 4
        super().store(view, loc[:whole], values[:whole])


class ForgetsValues(ReferenceKernels):
    def store_kv(self, k_view, v_view, loc, k, v):
        self.store(k_view, loc, k)


class PutsRopeBehindTheLatent(ReferenceKernels):
    def store_mla(self, view, loc, latent, rope):
        super().store_mla(view[..., : latent.shape[-1] + rope.shape[-1]], loc, latent, rope)


class MovesOneByOne(ReferenceKernels):
    def move(self, views, tgt_loc, src_loc):
        for target, source in zip(tgt_loc.split(1), src_loc.split(1), strict=True):
            super().move(views, target, source)


class ClearsTheFirstView(ReferenceKernels):
    def clear(self, views, loc):
        super().clear(views[:1], loc)


class CopiesBackwards(ReferenceKernels):
    def copy_rows(self, tgt_view, tgt_loc, src_view, src_loc):
        super().copy_rows(src_view, src_loc, tgt_view, tgt_loc)


class StoresTheNextStep(ReferenceKernels):
    def store_step(self, view, rows, step, values):
        super().store_step(view, rows, max(0, step - 1), values)


class CommitsTheFirstStep(ReferenceKernels):
    def commit_steps(self, pairs, rows, steps, loc):
        super().commit_steps(pairs, rows, steps * 0, loc)


class WritesRowsAsIfShort(ReferenceKernels):
    def write_rows(self, table, rows, columns, slots):
        table.as_strided(table.shape, (table.shape[1], 1))[rows.long(), columns.long()] = slots.to(table.dtype)


class WritesSpansByEnds(ReferenceKernels):
    def write_spans(self, table, rows, starts, ends, slots):
        whole = ends > starts
        super().write_spans(table, rows[whole][::-1], starts[whole][::-1], ends[whole][::-1], slots)


class ReadsTheLastWord(ReferenceKernels):
    def read_pages(self, table, rows, firsts, lasts, page_size):
        return super().read_pages(table + 1, rows, firsts, lasts, page_size)


class TranslatesMinusOne(ReferenceKernels):
    def translate(self, mapping, loc, page_size=1):
        return super().translate(mapping, loc.clamp(min=0), page_size)


class RoundsScales(ReferenceKernels):
    def quantize_blocks(self, values, dtype, block):
        data, scales = super().quantize_blocks(values, dtype, block)
        return data, scales if scales.dtype == torch.uint8 else scales * (1 + 2**-20)


class SpreadsNaN(ReferenceKernels):
    def dequantize_blocks(self, data, scales, dtype, block):
        found = super().dequantize_blocks(data, scales, dtype, block)
        return torch.where(found.isnan().any(-1, keepdim=True), torch.nan, found)


class LoadsEveryBlockAlike(ReferenceKernels):
    def load_blocks(self, data, scales, loc, block_format, dtype, global_scale=None):
        first = scales[..., :1].expand_as(scales)
        return super().load_blocks(data, first, loc, block_format, dtype, global_scale)


class ReadsTheSlots(ReferenceKernels):
    def gather(self, view, loc):
        return super().gather(view, torch.tensor(loc.tolist(), dtype=torch.int64))


class ClearsThePadding(ReferenceKernels):
    def store(self, view, loc, values):
        super().store(view, loc, values)
        if len(loc) > loc.unique().numel():
            view[0, 1 % view.shape[1]] = 0


class TakesRowsForDense(ReferenceKernels):
    def store_kv(self, k_view, v_view, loc, k, v):
        dense = torch.empty(k.shape, device="meta").stride()
        super().store_kv(k_view, v_view, loc, k.as_strided(k.shape, dense), v)


class MovesIn32Bits(ReferenceKernels):
    def move(self, views, tgt_loc, src_loc):
        for view in views:
            row = view.stride(1) if view.shape[1] > 1 else view.stride(0)
            target = ((tgt_loc * row).to(torch.int32) // row).to(torch.int64) % view.shape[:2].numel()
            super().move([view], target, src_loc)


class MovesOneType(ReferenceKernels):
    def move(self, views, tgt_loc, src_loc):
        super().move([view for view in views if view.dtype is views[0].dtype], tgt_loc, src_loc)


class LooksAtSteps(ReferenceKernels):
    def commit_steps(self, pairs, rows, steps, loc):
        if rows.shape[0] and rows[0].item() >= 0:
            super().commit_steps(pairs, rows, steps, loc)


for _cls in ReferenceKernels.__subclasses__():
    if _cls.__module__ == __name__:
        globals()[f"Test{_cls.__name__}"] = type(
            f"Test{_cls.__name__}",
            (KernelSuite,),
            {"kernels": lambda self, cls=_cls: cls(), "page_sizes": (1, 4), "runs_on_meta": True},
        )
